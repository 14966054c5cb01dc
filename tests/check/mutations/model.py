"""One fault each in the model of a YAML: its owner, its shapes, its state, its use."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from speechbrain import Stage
from torch import nn
from torch.optim import SGD

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.data.batch import Batch
from sbkit.models.encoder import Predictions
from sbkit.models.loss import Loss
from sbkit.train.step import Objective
from tests.check.harness import brain, changed, error, mutation, note

WITHOUT_DECODER = ("--num_decoder_layers=0", "--ctc_weight=1.0")
SEQ_LIN = (
    "seq_lin: !new:torch.nn.Linear\n    in_features: !ref <d_model>\n    out_features: !ref "
    "<tokenizer.vocab_size>\n\nctc_lin:"
)
HEADS = "!ref <seq_lin>, !ref <ctc_lin>]"
CTC = "hparams/ctc.yaml"
LOBES = "hparams/ctc_speechbrain.yaml"


class Scorer:
    """An object that holds a module but is none, as a beam search may be."""

    def __init__(self, size: int) -> None:
        self.lin = nn.Linear(size, size)


class HiddenInList(AsrBrain):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = [(nn.Linear(3, 3),)]


class Forgetting(AsrBrain):
    def init_optimizers(self) -> None:
        self.optimizers_dict = {"all": SGD(self.modules.parameters(), lr=0.1)}


class Unmade(AsrBrain):
    def init_optimizers(self) -> None:
        raise ValueError("Invalid beta parameter")


class Unsavable(AsrBrain):
    def init_optimizers(self) -> None:
        super().init_optimizers()
        self.checkpointer.add_recoverable("rho", object())


class FrozenFrontEnd(AsrBrain):
    def init_optimizers(self) -> None:
        super().init_optimizers()
        self.network.encoder.modules["CNN"].requires_grad_(False)


class WithoutDecoder(AsrBrain):
    def compute_objectives(self, predictions: Predictions, batch: Batch, stage: Stage) -> Loss:
        if getattr(self.hparams, "drops_decoder", True):
            predictions = replace(predictions, logits=None)
        return super().compute_objectives(predictions, batch, stage)


class SecondStep(AsrBrain):
    def fit_batch(self, batch: Batch) -> Objective:
        if self.optimizer_step == 1:
            raise RuntimeError("no second step")
        return super().fit_batch(batch)


class LayersInList(AsrBrain):
    def __init__(self, *, hparams: dict[str, Any], **options: Any) -> None:
        hparams["Transformer"].layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
        super().__init__(hparams=hparams, **options)


class SpareLayer(AsrBrain):
    def __init__(self, *, hparams: dict[str, Any], **options: Any) -> None:
        hparams["CNN"].spare = nn.Linear(3, 3)
        super().__init__(hparams=hparams, **options)


def with_teacher(*helpers: str, learns: bool = False) -> type[AsrRecipe]:
    class WithTeacher(AsrBrain):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.teacher = {"bn": [nn.BatchNorm1d(3).requires_grad_(learns)]}

        def compute_forward(self, batch: Batch, stage: Stage) -> Predictions:
            self.teacher["bn"][0].running_mean += 1
            return super().compute_forward(batch, stage)

    return changed(brain=type("Teaching", (WithTeacher,), {"helpers": helpers}))


def optimizing(**groups: Callable[[AsrBrain], Iterable[nn.Parameter]]) -> type[AsrRecipe]:
    class Optimizing(AsrBrain):
        def init_optimizers(self) -> None:
            self.optimizers_dict = {name: SGD(groups[name](self), lr=0.1) for name in groups}
            self.checkpointer.add_recoverables(self.optimizers_dict)

    return brain(Optimizing)


def all_parameters(brain: AsrBrain) -> Iterable[nn.Parameter]:
    return brain.modules.parameters()


def front_end(part: str) -> tuple[tuple[str, str], ...]:
    return (("!new:sbkit.models.frontend.ConvFrontEnd", f"!new:tests.check.parts.{part}"),)


HERE = f"!new:{__name__}"
SPARE_HEAD = """spare_head: !name:torch.nn.functional.linear
    weight: !new:torch.nn.Parameter [!apply:torch.ones [2, 2]]"""

MUTATIONS = [
    # -- who owns the parameters, and who updates them
    mutation(
        "a scorer with a layer of its own",
        error("ownership", "scorer", "`scorer.lin` holds 12 parameters", "Add `!ref <scorer>`"),
        error("unread", "scorer"),
        text=(("spec_augment: ", f"scorer: {HERE}.Scorer\n    size: 3\nspec_augment: "),),
    ),
    mutation(
        "a layer in a partial",
        error("ownership", "spare_head.weight", "`spare_head.weight` holds 4 parameters"),
        error("unread", "spare_head"),
        text=(("lr_schedule: ", f"{SPARE_HEAD}\nlr_schedule: "),),
    ),
    mutation(
        "a layer of the Brain",
        error("ownership", "model", "`brain.extra.0.0` holds", "12 parameters"),
        recipe=brain(HiddenInList),
    ),
    mutation(
        "a frozen teacher that is not declared",
        error("ownership", "model", "holds 6 parameters", '`helpers = ("teacher",)`'),
        recipe=with_teacher(),
    ),
    mutation(
        "a teacher that learns",
        error("run", "model", "`teacher` of `helpers` must be frozen", "but wants a gradient"),
        recipe=with_teacher("teacher", learns=True),
    ),
    mutation(
        "a teacher that changes",
        error("helpers", "model", "changes in a step", 'add_recoverable("teacher", MODULE)'),
        recipe=with_teacher("teacher"),
    ),
    mutation(
        "layers in a Python list",
        error("ownership", "Transformer", "`Transformer.layers` holds 36", "a torch.nn.ModuleList"),
        recipe=brain(LayersInList),
    ),
    mutation(
        "a layer twice in the list",
        error("ownership", "model", "holds `ctc_lin` 2 times"),
        text=((HEADS, "!ref <seq_lin>, !ref <ctc_lin>, !ref <ctc_lin>]"),),
    ),
    mutation(
        "a checkpointer without the model",
        error("optimizers", "checkpointer.recoverables", "in no checkpoint", "`epochs`"),
        text=(("        model: !ref <model>\n", ""),),
    ),
    mutation(
        "a checkpointer without epochs and optimizer",
        error("optimizers", "checkpointer.recoverables", "EpochCounter, SGD would be in"),
        text=(("        epochs: !ref <epoch_counter>\n", ""),),
        recipe=brain(Forgetting),
    ),
    mutation(
        "an optimizer that cannot be made",
        error("shapes", ".yaml:1", "fails in the recipe (ValueError: Invalid beta"),
        recipe=brain(Unmade),
    ),
    mutation(
        "state that cannot be saved",
        error("optimizers", "checkpointer.recoverables", "can hold `rho` (object)"),
        recipe=brain(Unsavable),
    ),
    mutation(
        "loaders that cannot be made",
        error("run", ".yaml:1", "The run cannot be made", "IndexError"),
        recipe=changed(make_loaders=lambda *parts: parts[9]),
    ),
    mutation(
        "a parameter in two groups",
        error("optimizers", "opt_class", "More than one group", "`ctc_lin.weight` and 1 more"),
        recipe=optimizing(a=all_parameters, b=lambda b: b.hparams.ctc_lin.parameters()),
    ),
    mutation(
        "a parameter in no group",
        error("optimizers", "opt_class", "No optimizer updates `CNN.conv1.weight`"),
        recipe=optimizing(encoder=lambda brain: brain.hparams.Transformer.parameters()),
    ),
    mutation(
        "a parameter that only the optimizer has",
        error("optimizers", "opt_class", "Outside `model`, an optimizer updates a parameter"),
        recipe=optimizing(all=lambda b: [*all_parameters(b), nn.Parameter(torch.zeros(3))]),
    ),
    # -- shapes and use
    mutation(
        "features of another size than the CNN's",
        error("shapes", "CNN.normalize", "fails in `CNN.normalize`", "(80)"),
        options=("--compute_features.n_mels=40",),
    ),
    mutation(
        "a misspelled key at depth three",
        error("run", "CNN.normalize", "keyword argument 'n_mel'"),
        text=(("        n_mels: !ref <n_mels>\n    n_mels", "        n_mel: 80\n    n_mels"),),
    ),
    mutation(
        "a decoder without layers",
        error("shapes", "num_decoder_layers", "`num_decoder_layers` is 0"),
        options=("--num_decoder_layers=0",),
    ),
    mutation(
        "lobes: a loss that they cannot give",
        error("shapes", "inter_ctc_weight", "Set it to 0.0"),
        yaml=LOBES,
        options=("--inter_ctc_weight=0.3",),
    ),
    mutation(
        "a layer that is never run, frozen for a time",
        error("unused", "CNN", "`CNN.spare`", "is never run"),
        error("export", "model", "0.spare.bias: 3 instead of none"),  # the Brain adds it
        recipe=brain(SpareLayer),
        options=("--freeze={CNN: 1}",),
    ),
    mutation(
        "a head for the middle, whose loss is turned off",
        error("unused", "inter_ctc_weight", "`seq_lin` cannot learn with `inter_ctc_weight: 0"),
        options=(*WITHOUT_DECODER, "--inter_ctc_weight=0"),
    ),
    mutation(
        "the head taken out, as its error says",
        text=((SEQ_LIN, "ctc_lin:"), (HEADS, "!ref <ctc_lin>]")),
        options=WITHOUT_DECODER,
    ),
    mutation(
        "a part that the Brain freezes, but not the YAML",
        note("unused", "CNN", "FrozenFrontEnd freezes `CNN`", "`freeze: [CNN]`"),
        recipe=brain(FrozenFrontEnd),
    ),
    mutation(
        "a decoder whose output is dropped",
        error("unused", "Transformer", "`Transformer.decoder`, `Transformer.embedding`"),
        error("unused", "seq_lin", "does not reach the loss"),
        recipe=brain(WithoutDecoder),
    ),
    mutation(
        "a decoder that a key of the recipe's own turns off",
        error("unused", "drops_decoder", "`Transformer.decoder`", "with `drops_decoder: true`"),
        recipe=brain(WithoutDecoder),
        text=(("lr_schedule: ", "drops_decoder: True\nlr_schedule: "),),
    ),
    mutation(
        "an own step that fails when it is called again",
        error("shapes", ".yaml:1", "fails in the recipe (RuntimeError: no second step)"),
        recipe=brain(SecondStep),
    ),
    # -- interfaces
    mutation(
        "a streaming model that needs the level of whole utterances",
        error("run", "level", "must be `running`", "chunk by chunk"),
        yaml="hparams/ctc_streaming.yaml",
        options=("--level=utterance",),
    ),
    mutation(
        "a front-end that returns the lengths of its input",
        error("shapes", "CNN", "`subsampling`"),
        text=front_end("UndividedFrontEnd"),
    ),
    mutation(
        "a decoder that sees the answer",
        error("causality", "Transformer", "sees the tokens", "causal mask"),
        text=(("!new:sbkit.models.transformer.Tr", "!new:tests.check.parts.AcausalTr"),),
    ),
    *(
        mutation(
            name,
            note("padding", "model", "% beside a longer", "take lengths"),
            yaml=yaml,
            text=text,
        )
        for name, yaml, text in (
            ("an LSTM from padding", CTC, front_end("BackwardFrontEnd")),
            ("convolutions that see padding", LOBES, ()),  # as the YAML says itself
        )
    ),
    mutation(
        "a learning rate of 25",
        error("steps", "lr", "at a learning rate of 25 raise", "Lower `lr`"),
        options=("--lr=25",),
    ),
    mutation(
        "a front-end that rounds",
        note("unused", "CNN", "`CNN` has gradients of zero", "round()"),
        text=front_end("RoundingFrontEnd"),
    ),
    # -- state
    mutation(
        "a statistic that is no buffer",
        error("state", "CNN", "`CNN.mean` is changed by training", "register_buffer"),
        text=front_end("RunningMeanFrontEnd"),
    ),
    mutation(
        "a statistic in a closure",
        error("state", "model", "`model` is changed"),
        text=front_end("ClosureFrontEnd"),
    ),
    mutation(
        "a buffer that keeps the graph of a step",
        error("shapes", ".yaml:1", "through the graph a second time"),
        text=front_end("AttachedFrontEnd"),
    ),
    mutation(
        "healthy, though odd",
        text=(
            *front_end("OddFrontEnd"),
            ("lr_schedule: ", "called: !apply:os.getcwd\nlr_schedule: "),
        ),
    ),
    mutation(
        "a layer that forward makes",
        error("state", "CNN", "`CNN.late` is made by `forward`", "in `__init__`"),
        error("export", "model", "0.late.bias: 80 instead of none"),
        text=front_end("LateFrontEnd"),
    ),
]
