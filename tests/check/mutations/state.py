"""What a model has that no checkpoint holds, and what its features do not tell."""

from tests.check.harness import Expected, Mutation

CNN = "!new:sbkit.models.frontend.ConvFrontEnd"
NORMALIZE = "    normalize: !new:sbkit.models.normalize.GlobalNorm\n        n_mels: !ref <n_mels>\n"
SPEECHBRAINS = "!new:speechbrain.processing.features.InputNormalization"
UNLISTED = Expected("export", "CNN", ("tests.check.parts",), stops=False)


def front_end(part: str) -> tuple[tuple[str, str], ...]:
    return ((CNN, f"!new:tests.check.parts.{part}"),)


MUTATIONS = [
    Mutation(
        name="a statistic that is no buffer",
        text=front_end("RunningMeanFrontEnd"),
        expected=(
            Expected("state", "CNN", ("`CNN.mean` is changed by training", "register_buffer")),
            UNLISTED,
        ),
    ),
    Mutation(
        name="a statistic in a closure",
        text=front_end("ClosingFrontEnd"),
        expected=(Expected("state", "model", ("`model` is changed",)), UNLISTED),
    ),
    Mutation(
        name="a buffer that keeps the graph of a step",
        text=front_end("AttachedFrontEnd"),
        expected=(Expected("shapes", ".yaml:1", ("through the graph a second time",)),),
    ),
    Mutation(
        name="healthy layer that a part compiles by itself",
        text=front_end("CompiledFrontEnd"),
        expected=(UNLISTED,),
    ),
    Mutation(
        name="SpeechBrain's running normalization",
        yaml="hparams/ctc_speechbrain.yaml",
        text=((NORMALIZE, f"    normalize: {SPEECHBRAINS}\n"),),
        expected=(
            Expected("state", "CNN.normalize", ("`CNN.normalize.glob_mean`", "a checkpoint")),
        ),
    ),
    Mutation(
        name="healthy attributes",
        text=front_end("CountingFrontEnd"),
        expected=(UNLISTED,),
    ),
    Mutation(
        name="healthy layer that most steps drop",
        text=front_end("DroppingFrontEnd"),
        expected=(UNLISTED,),
    ),
    Mutation(
        name="a layer that forward makes",
        text=front_end("LateFrontEnd"),
        expected=(
            Expected("state", "CNN", ("`CNN.late` is made by `forward`", "in `__init__`")),
            UNLISTED,
        ),
    ),
    Mutation(
        name="a layer in a cache",
        text=front_end("CachingFrontEnd"),
        expected=(
            Expected("ownership", "CNN", ("in `CNN` uses 6,480 parameters that no part",)),
            Expected("state", "model", ("`model` is changed",)),
            UNLISTED,
        ),
    ),
    Mutation(
        name="more mel bins than the spectrum has steps for",
        options=("--n_mels=400",),
        expected=(
            Expected("features", "n_mels", ("of the 400 values", "same in every"), stops=False),
        ),
    ),
]
