"""One Brain each that computes something else than the bundle of its run, or only seems to."""

from dataclasses import replace
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from recipes.asr.brain import AsrBrain
from recipes.codec.brain import CodecBrain
from recipes.codec.recipe import CodecRecipe
from sbkit.check.exported import check_export
from sbkit.data.batch import TextBatch
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.models.encoder import Predictions
from sbkit.tasks.codec.model import CodedBatch
from tests.check.harness import Expected, Mutation, brain, error, mutation, note
from tests.runs import TINY_CODEC


class HookedHead(AsrBrain):
    """Writes fewer blanks, by a hook that only the head of a name has."""

    head = "ctc_lin"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hparams.settings[self.head].register_forward_hook(self.penalize)

    def penalize(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output - 6 * (torch.arange(output.shape[-1]) == 0)


class HookedDecoder(HookedHead):
    head = "seq_lin"


class PatchedLayers(AsrBrain):
    """Rounds the weights of all layers as they are used, as for eight bits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for layer in self.hparams.Transformer.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, m=layer: nn.functional.linear(x, self.coarse(m), m.bias)

    def coarse(self, layer: nn.Linear) -> Tensor:
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (layer.weight / scale).round() * scale
        return layer.weight + (rounded - layer.weight).detach()


class LouderZeros(AsrBrain):
    """Multiplies the output of a layer that starts at zero."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.no_grad():
            self.hparams.ctc_lin.weight.zero_()
            self.hparams.ctc_lin.bias.zero_()
        self.hparams.ctc_lin.register_forward_hook(lambda module, inputs, output: 2 * output)


class WithoutTail(AsrBrain):
    """Changes an attribute of the network."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.network.tail_samples = 0


class OwnForward(AsrBrain):
    """Writes fewer blanks, without a change of the network."""

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        outputs = super().compute_forward(batch, stage)
        is_blank = torch.arange(outputs.log_probs.shape[-1]) == 0
        return replace(outputs, log_probs=(outputs.log_probs - 6 * is_blank).log_softmax(-1))


class LouderCodec(CodecBrain):
    def compute_forward(self, batch: Any, stage: Stage) -> CodedBatch:
        outputs = super().compute_forward(batch, stage)
        return outputs._replace(decoded=2 * outputs.decoded)


class FlatteringCodec(CodecBrain):
    def compute_forward(self, batch: Any, stage: Stage) -> CodedBatch:
        outputs = super().compute_forward(batch, stage)
        return outputs._replace(mel_distance_sum=outputs.mel_distance_sum / 2)


class GivenTokens(AsrBrain):
    """Validates the scores of given tokens, and only listens to its layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: list[int] = []
        self.hparams.ctc_lin.register_forward_hook(
            lambda module, inputs, output: self.sizes.append(output.numel())
        )

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Any:
        outputs = super().compute_forward(batch, stage)
        return outputs if stage is Stage.TRAIN else (outputs, outputs.logits)

    def compute_objectives(self, outputs: Any, batch: TextBatch, stage: Stage) -> Any:
        predictions = outputs if stage is Stage.TRAIN else outputs[0]
        return super().compute_objectives(predictions, batch, stage)

    def score(self, outputs: Any, batch: TextBatch) -> list[ScoredUtterance]:
        quieter = replace(outputs[0], log_probs=outputs[0].log_probs / 2)
        return super().score(quieter, batch)


def exported(name: str, kind: type[AsrBrain], *expected: Expected) -> Mutation:
    return mutation(name, *expected, recipe=brain(kind), checks=(check_export,))


def codec(name: str, kind: type[CodecBrain], *expected: Expected) -> Mutation:
    options: Any = {"yaml": "hparams/codec.yaml", "tiny": TINY_CODEC, "checks": (check_export,)}
    recipe = type("Changed", (CodecRecipe,), {"brain": kind})
    return mutation(name, *expected, recipe=recipe, options=ADVERSARIAL, **options)


ADVERSARIAL = ("--adversarial_weight=1",)  # else a key of TINY_CODEC has no effect
ELSE = "computes something else in"
MEASURES = "so a validation measures another model"
MUTATIONS = [
    exported(
        "a penalty by a hook",
        HookedHead,
        error("export", "ctc_lin", f"`ctc_lin` {ELSE} HookedHead", "by a hook"),
    ),
    exported(
        "a penalty of a decoder that no greedy text needs",
        HookedDecoder,
        error("export", "seq_lin", f"`seq_lin` {ELSE} HookedDecoder"),
    ),
    exported(
        "layers with another forward",
        PatchedLayers,
        error("export", "Transformer", "`Transformer.encoder.0.", f"{ELSE} PatchedLayers"),
    ),
    exported(
        "an output that is zero at first",
        LouderZeros,
        error("export", "ctc_lin", f"`ctc_lin` {ELSE} LouderZeros"),
    ),
    exported(
        "a network without the zeros after a clip",
        WithoutTail,
        error("export", "CNN", f"{ELSE} WithoutTail"),
    ),
    exported(
        "a penalty in compute_forward",
        OwnForward,
        error("export", "recipe", "`compute_forward` of OwnForward does not return", MEASURES),
    ),
    codec(
        "a codec that halves its error",
        FlatteringCodec,
        error("export", "recipe", "`compute_forward` of FlatteringCodec", MEASURES),
    ),
    codec(
        "outputs that predictions do not depend on",
        LouderCodec,
        note("export", "recipe", "`compute_forward` of LouderCodec"),
    ),
    exported("a validation of given tokens", GivenTokens),
]
