"""What a model has that no checkpoint holds, and what its features do not tell."""

from tests.check.harness import Expected, Mutation

CNN = "!new:sbkit.models.frontend.ConvFrontEnd"


def front_end(part: str) -> tuple[tuple[str, str], ...]:
    return ((CNN, f"!new:tests.check.parts.{part}"),)


MUTATIONS = [
    Mutation(
        name="a statistic that is no buffer",
        text=front_end("RunningMeanFrontEnd"),
        expected=(
            Expected("state", "CNN", ("`CNN.mean` is changed by training", "register_buffer")),
        ),
    ),
    Mutation(
        name="a statistic in a closure",
        text=front_end("ClosingFrontEnd"),
        expected=(Expected("state", "model", ("`model` is changed",)),),
    ),
    Mutation(
        name="a buffer that keeps the graph of a step",
        text=front_end("AttachedFrontEnd"),
        expected=(Expected("shapes", ".yaml:1", ("through the graph a second time",)),),
    ),
    Mutation(
        name="healthy layer that a part compiles by itself",
        text=front_end("CompiledFrontEnd"),
        expected=(),
    ),
    Mutation(
        name="healthy attributes",
        text=front_end("CountingFrontEnd"),
        expected=(),
    ),
    Mutation(
        name="healthy layer that most steps drop",
        text=front_end("DroppingFrontEnd"),
        expected=(),
    ),
    Mutation(
        name="a layer that forward makes",
        text=front_end("LateFrontEnd"),
        expected=(Expected("state", "CNN", ("`CNN.late` is made by `forward`", "in `__init__`")),),
    ),
    Mutation(
        name="a layer in a cache",
        text=front_end("CachingFrontEnd"),
        expected=(Expected("state", "model", ("`model` is changed",)),),
    ),
]
