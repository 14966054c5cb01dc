"""One fault each in the model of a YAML: its owner, its shapes, its state, its use."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from recipes.asr.recipe import AsrBrain
from sbkit.data.batch import Batch
from sbkit.models.asr import Predictions
from sbkit.models.loss import Loss
from sbkit.train.recipe import Recipe
from tests.check.harness import Expected, Mutation

PARTS = "[!ref <CNN>, !ref <Transformer>, !ref <seq_lin>, !ref <ctc_lin>]"
HEADS = "!ref <seq_lin>, !ref <ctc_lin>]"
CTC = "hparams/ctc.yaml"
LOBES = "hparams/ctc_speechbrain.yaml"


# -- mistakes of a recipe -----------------------------------------------------------------------


class Scorer:
    """An object that holds a module but is none, as a beam search may be."""

    def __init__(self, size: int) -> None:
        self.lin = nn.Linear(size, size)

    def score(self, states: Tensor) -> Tensor:
        scored: Tensor = self.lin(states)
        return scored


class HiddenInList(AsrBrain):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = [(nn.Linear(3, 3),)]


class TwoGroups(AsrBrain):
    def init_optimizers(self) -> None:
        model, head = self.hparams.model, self.hparams.ctc_lin
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        self.checkpointer.add_recoverables({"all": self.optimizer, "head": self.head_optimizer})
        self.optimizers_dict = {"all": self.optimizer, "head": self.head_optimizer}


class Forgetting(AsrBrain):
    def init_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.modules.parameters(), lr=0.1)
        self.optimizers_dict = {"all": self.optimizer}


class NoGroup(AsrBrain):
    def init_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.hparams.Transformer.parameters(), lr=0.1)
        self.checkpointer.add_recoverable("encoder", self.optimizer)
        self.optimizers_dict = {"encoder": self.optimizer}


class TrainsAnother(AsrBrain):
    def init_optimizers(self) -> None:
        everything = [*self.modules.parameters(), nn.Parameter(torch.zeros(3))]
        self.optimizer = torch.optim.SGD(everything, lr=0.1)
        self.checkpointer.add_recoverable("all", self.optimizer)
        self.optimizers_dict = {"all": self.optimizer}


class Unmade(AsrBrain):
    def init_optimizers(self) -> None:
        raise ValueError("Invalid beta parameter")


class WithoutDecoder(AsrBrain):
    def compute_objectives(self, predictions: Predictions, batch: Batch, stage: Stage) -> Loss:
        without = replace(predictions, logits=None)
        return super().compute_objectives(without, batch, stage)


class LayersInList(AsrBrain):
    def __init__(self, *, hparams: dict[str, Any], **options: Any) -> None:
        hparams["Transformer"].layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
        super().__init__(hparams=hparams, **options)


class SpareLayer(AsrBrain):
    def __init__(self, *, hparams: dict[str, Any], **options: Any) -> None:
        hparams["CNN"].spare = nn.Linear(3, 3)
        super().__init__(hparams=hparams, **options)


def brain(kind: Callable[..., Any]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, brain=kind)


HERE = f"!new:{__name__}"

OWNERSHIP = [
    Mutation(
        name="ctc_lin left out of the list",
        text=((PARTS, PARTS.replace(", !ref <ctc_lin>", "")),),
        expected=(Expected("ownership", "ctc_lin", ("`ctc_lin` holds", "Add `!ref")),),
    ),
    Mutation(
        name="a scorer with a layer of its own",
        text=(("spec_augment: ", f"scorer: {HERE}.Scorer\n    size: 3\nspec_augment: "),),
        expected=(
            Expected("ownership", "scorer", ("`scorer.lin` holds 12 parameters",)),
            Expected("unread", "scorer"),
        ),
    ),
    Mutation(
        name="a layer in a partial",
        text=(
            (
                "lr_schedule: ",
                "spare_head: !name:torch.nn.functional.linear\n"
                "    weight: !new:torch.nn.Parameter [!apply:torch.ones [2, 2]]\nlr_schedule: ",
            ),
        ),
        expected=(
            Expected("ownership", "spare_head.weight", ("`spare_head.weight` holds 4 parameters",)),
            Expected("unread", "spare_head"),
        ),
    ),
    Mutation(
        name="a layer of the Brain",
        recipe=brain(HiddenInList),
        expected=(Expected("ownership", "model", ("`brain.extra.0.0` holds", "12 parameters")),),
    ),
    Mutation(
        name="layers in a Python list",
        recipe=brain(LayersInList),
        expected=(
            Expected(
                "ownership",
                "Transformer",
                ("`Transformer.layers` holds 36 parameters", "a torch.nn.ModuleList"),
            ),
        ),
    ),
    Mutation(
        name="a layer twice in the list",
        text=((HEADS, "!ref <seq_lin>, !ref <ctc_lin>, !ref <ctc_lin>]"),),
        expected=(Expected("ownership", "model", ("holds `ctc_lin` 2 times",)),),
    ),
    Mutation(
        name="a checkpointer without the model",
        text=(("        model: !ref <model>\n", ""),),
        expected=(
            Expected("optimizers", "checkpointer.recoverables", ("in no checkpoint", "`epochs`")),
        ),
    ),
    Mutation(
        name="a checkpointer without epochs and optimizer",
        text=(("        epochs: !ref <epoch_counter>\n", ""),),
        recipe=brain(Forgetting),
        expected=(
            Expected(
                "optimizers",
                "checkpointer.recoverables",
                ("EpochCounter, Adam would be in",),
            ),
        ),
    ),
    Mutation(
        name="an optimizer that cannot be made",
        recipe=brain(Unmade),
        expected=(Expected("optimizers", "opt_class", ("ValueError: Invalid beta",)),),
    ),
    Mutation(
        name="loaders that cannot be made",
        recipe=lambda recipe: replace(recipe, make_loaders=lambda *parts: parts[9]),
        expected=(Expected("loaders", ".yaml:1", ("The loaders of the run", "IndexError")),),
    ),
    Mutation(
        name="a parameter in two groups",
        recipe=brain(TwoGroups),
        expected=(
            Expected("optimizers", "opt_class", ("`ctc_lin.weight` and 1 more", "more than one")),
        ),
    ),
    Mutation(
        name="a parameter in no group",
        recipe=brain(NoGroup),
        expected=(Expected("optimizers", "opt_class", ("`CNN.conv1.weight`", "never train")),),
    ),
    Mutation(
        name="a parameter that only the optimizer has",
        recipe=brain(TrainsAnother),
        expected=(Expected("optimizers", "opt_class", ("not in the model",)),),
    ),
]

SHAPES = [
    Mutation(
        name="the CNN is wider than the Transformer",
        options=("--CNN.d_model=48",),
        expected=(Expected("shapes", "Transformer", ("fails in `Transformer", "RuntimeError")),),
    ),
    Mutation(
        name="features of another size than the CNN's",
        options=("--compute_features.n_mels=40",),
        expected=(Expected("shapes", "CNN.normalize", ("fails in `CNN.normalize`", "(80)")),),
    ),
]

UNUSED = [
    Mutation(
        name="a misspelled key at depth three",
        text=(("        n_mels: !ref <n_mels>\n    n_mels", "        n_mel: 80\n    n_mels"),),
        expected=(Expected("hparams", "CNN.normalize", ("keyword argument 'n_mel'",)),),
    ),
    Mutation(
        name="a decoder without layers",
        options=("--num_decoder_layers=0",),
        expected=(Expected("dry_run", "num_decoder_layers", ("has no decoder",)),),
    ),
    Mutation(
        name="lobes: a loss that they cannot give",
        yaml=LOBES,
        options=("--inter_ctc_weight=0.3",),
        expected=(Expected("dry_run", "inter_ctc_weight", ("Set it to 0.0",)),),
    ),
    Mutation(
        name="a layer that is never run",
        recipe=brain(SpareLayer),
        expected=(Expected("unused", "CNN", ("`CNN.spare`", "is never run")),),
    ),
    Mutation(
        name="a decoder whose output is dropped",
        recipe=brain(WithoutDecoder),
        expected=(
            Expected(
                "unused",
                "Transformer",
                ("`Transformer.decoder`, `Transformer.embedding`", "does not reach the loss"),
            ),
            Expected("unused", "seq_lin", ("does not reach the loss",)),
        ),
    ),
    Mutation(
        name="a layer that never runs, frozen for a time",
        recipe=brain(SpareLayer),
        options=("--freeze={CNN: 1}",),
        expected=(Expected("unused", "CNN", ("`CNN.spare`", "is never run")),),
    ),
    *(
        Mutation(
            name=f"a path of {knob} that leads nowhere",
            options=(f"--{knob}={{CNNs: 1}}",),
            expected=(Expected("brain", knob, ("must name modules", "`CNN", advice)),),
        )
        for knob, advice in {
            **dict.fromkeys(("freeze", "lr_scale"), "Did you mean `CNN`"),
            "layer_decay": "the lists Transformer.encoder, Transformer.decoder",
        }.items()
    ),
]

CNN = "!new:sbkit.models.frontend.ConvFrontEnd"


def front_end(part: str) -> tuple[tuple[str, str], ...]:
    return ((CNN, f"!new:tests.check.parts.{part}"),)


INTERFACES = [
    *(
        Mutation(
            name=f"a front-end with another interface: {part}",
            text=((CNN, f"!new:tests.check.parts.{part}"),),
            expected=(Expected(check, "CNN", ("`CNN` must", said)),),
        )
        for part, check, said in (
            ("LensFrontEnd", "brain", "its forward takes (x, lens)"),
            ("UndividedFrontEnd", "dry_run", "count what its strides leave"),
        )
    ),
    Mutation(
        name="features that are made for another rate than the audio's",
        text=(("    sample_rate: !ref <sample_rate>\n\nspec", "    sample_rate: 8000\n\nspec"),),
        expected=(Expected("hparams", "compute_features", ("made for 8000 Hz",)),),
    ),
    Mutation(
        name="a decoder that sees the answer",
        text=(
            (
                "!new:sbkit.models.transformer.Transformer",
                "!new:tests.check.parts.AcausalTransformer",
            ),
        ),
        expected=(
            Expected("causality", "Transformer", ("change with the last one", "causal mask")),
        ),
    ),
    *(
        Mutation(
            name=name,
            yaml=yaml,
            text=text,
            expected=(
                Expected("padding", "model", ("% beside a longer", "take lengths"), stops=False),
            ),
        )
        for name, yaml, text in (
            ("a mean over padding", CTC, ((CNN, "!new:tests.check.parts.CenteringFrontEnd"),)),
            ("an LSTM from padding", CTC, ((CNN, "!new:tests.check.parts.BackwardFrontEnd"),)),
            ("convolutions that see padding", LOBES, ()),  # as the YAML says itself
        )
    ),
    Mutation(
        name="a learning rate of 25",
        options=("--lr=25",),
        expected=(
            Expected("learning_rate", "lr", ("at a learning rate of 25 raise", "Lower `lr`")),
        ),
    ),
]

STATE = [
    Mutation(
        name="a statistic that is no buffer",
        text=front_end("RunningMeanFrontEnd"),
        expected=(
            Expected("state", "CNN", ("`CNN.mean` is changed by training", "register_buffer")),
        ),
    ),
    Mutation(
        name="a statistic in a closure",
        text=front_end("ClosureFrontEnd"),
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

MUTATIONS = [*INTERFACES, *OWNERSHIP, *SHAPES, *STATE, *UNUSED]
