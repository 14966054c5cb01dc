"""A pretrained encoder as three modules of a YAML: features, front-end and Transformer.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, M features of a
frame, C channels, D width.

Each has one argument in common, `config`: the sizes that are read from the folder of the pretrained
model, by the names that they have in its `config.json`. What is of one family stands in ``body``,
whose tensors have the names of the file; what all families share in training stands here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sbkit.audio.draws import draw_for_step
from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import AT_LEAST_ONE, SHARE, Range, require_in_range
from sbkit.models.pretrained.blocks import Config, mask_spans
from sbkit.models.pretrained.conformer import FastConformer, StackedFrames, StridedConvs, W2vBert
from sbkit.models.pretrained.features import NormalizedAudio, ParakeetFeatures, W2vBertFeatures
from sbkit.models.pretrained.lora import add_adapters
from sbkit.models.pretrained.wav2vec2 import ConvEncoder, Wav2Vec2

WEIGHTED = "weighted"  # in the place of a number of layers


class Family(NamedTuple):
    """The modules of one kind of pretrained encoder, each made of its config.

    prefix: of the names of the front-end's tensors in a file; mask_vector: whether a file has what
    stands in the place of hidden frames.
    """

    features: Callable[[Config], nn.Module]
    front_end: Callable[[Config], nn.Module]
    body: Callable[[Config], nn.Module]
    prefix: str
    mask_vector: bool = True


WAVEFORMS = Family(NormalizedAudio, ConvEncoder, Wav2Vec2, "feature_extractor.")
FAMILIES = {  # by the `model_type` of a `config.json`
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm"), WAVEFORMS),
    "wav2vec2-bert": Family(W2vBertFeatures, StackedFrames, W2vBert, ""),
    "parakeet_encoder": Family(
        ParakeetFeatures, StridedConvs, FastConformer, "subsampling.", mask_vector=False
    ),
}


class Part(nn.Module):
    """What makes frames of samples or of frames, as a family does it: (B, ...), (B,) -> same."""

    body: Any

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them."""
        frames, frame_lengths = self.body(x, lengths)
        return frames, frame_lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames of lengths: (B,) -> (B,)."""
        counted: Tensor = self.body.frame_lengths(lengths)
        return counted


class PretrainedFeatures(Part):
    """Compute what the encoder was trained on: (B, S), (B,) -> (B, T, M), (B,).

    For wav2vec 2.0 and its like that is audio, normalized, as (B, S, 1).
    """

    audio_scale = 1.0

    def __init__(self, *, config: Config) -> None:
        super().__init__()
        self.sample_rate: int = config["sample_rate"]  # Hz
        self.body = FAMILIES[config["model_type"]].features(config)


class PretrainedFrontEnd(Part):
    """Subsample features: (B, T, M), (B,) -> (B, U, C), (B,)."""

    def __init__(self, *, config: Config) -> None:
        super().__init__()
        family = FAMILIES[config["model_type"]]
        self.prefix = family.prefix
        self.body = family.front_end(config)


class PretrainedEncoder(nn.Module):
    """Encode frames: (B, U, C), (B,) -> (B, U, D).

    layers: so many of the first ones; null: all; `weighted`: all, and what each returns is summed
    by learned weights. intermediate_layer: the number of that whose output an inter-CTC loss reads;
    null: the one in the middle. lora: {rank: 8, alpha: 16, projections: [q_proj, v_proj]} freezes
    the weights of the encoder, and trains adapters of its Linear layers of these names; null: none.

    In training, not in evaluation: dropout; ``layerdrop``, the chance that a layer is left out;
    masks of time and of channels, of which each hides spans of a length until they make up a share
    of a clip, overlaps counted twice; and ``gradient_checkpointing``, with which the backward pass
    computes the activations of each layer again, with the same random numbers.
    """

    RANGES: ClassVar = {
        **dict.fromkeys(("mask_time_prob", "mask_channel_prob", "layerdrop", "dropout"), SHARE),
        **dict.fromkeys(("attention_dropout", "activation_dropout", "feat_proj_dropout"), SHARE),
        **dict.fromkeys(("mask_time_length", "mask_channel_length"), AT_LEAST_ONE),
        "layers": Range(
            low=1, whole=True, or_null=True, word=WEIGHTED, advice="Pass null for all layers."
        ),
        "intermediate_layer": Range(
            low=1, whole=True, or_null=True, advice="Pass null for the one in the middle."
        ),
    }

    def __init__(
        self,
        *,
        config: Config,
        layers: int | str | None = None,
        intermediate_layer: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.1,
        feat_proj_dropout: float = 0.0,
        layerdrop: float = 0.1,
        mask_time_prob: float = 0.65,
        mask_time_length: int = 10,
        mask_channel_prob: float = 0.5,
        mask_channel_length: int = 64,
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        family = FAMILIES[config["model_type"]]
        depth = config["num_hidden_layers"]
        count = layers if isinstance(layers, int) else depth
        middle = max(1, count // 2) if intermediate_layer is None else intermediate_layer
        for name, number, most in (("layers", count, depth), ("intermediate_layer", middle, count)):
            there = Range(low=1, high=most, whole=True, advice="Choose one of these layers.")
            require_in_range({name: number}, {name: there})
        self.intermediate_layer = middle
        rates = {"hidden_dropout": dropout, "feat_proj_dropout": feat_proj_dropout}
        rates |= {"attention_dropout": attention_dropout, "activation_dropout": activation_dropout}
        self.body: Any = family.body({**config, **rates, "num_hidden_layers": count})
        self.frame_masks = (mask_time_prob, mask_time_length)
        self.channel_masks = (mask_channel_prob, mask_channel_length)
        if mask_time_prob > 0 and family.mask_vector:
            self.body.masked_spec_embed = nn.Parameter(torch.zeros(config["hidden_size"]))
        if lora is not None:
            add_adapters(self.body, **lora)
        if layers == WEIGHTED:  # of what goes into the first layer, too
            self.layer_weights = nn.Parameter(torch.zeros(count + 1))
        self.layerdrop, self.gradient_checkpointing = layerdrop, gradient_checkpointing

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Encode frames: (B, U, C), (B,) -> (B, U, D)."""
        return self._encoded(x, lengths)[1]

    def encode_with_intermediate(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode, and return first the states after a layer in the middle: -> 2 x (B, U, D).

        Both through the same norm, so that one head can read either (Lee and Watanabe 2021).
        """
        middle, states = self._encoded(x, lengths)
        return self.body.finish(middle), states

    def _encoded(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after a layer in the middle, as they are, and those to predict from."""
        weights = getattr(self, "layer_weights", None)
        shares = None if weights is None else weights.softmax(0)
        middle = last = x
        summed: Tensor | None = None
        for number, last in enumerate(self._states(x, lengths)):
            if number == self.intermediate_layer:
                middle = last
            if shares is not None:
                share = shares[number] * self.body.finish(last)
                summed = share if summed is None else summed + share
        return middle, self.body.finish(last) if summed is None else summed

    def _states(self, x: Tensor, lengths: Tensor) -> Iterator[Tensor]:
        """Yield what goes into the first layer, and what comes out of each."""
        mask = length_mask(lengths, x.shape[1], x.device)  # (B, U)
        x = self.body.project(x)
        if self.training:
            vector = getattr(self.body, "masked_spec_embed", None)
            x = mask_spans(
                x, lengths, frames=self.frame_masks, channels=self.channel_masks, vector=vector
            )
        x, context = self.body.begin(x, mask)
        yield x
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for layer, is_dropped in zip(self.body.layers, self._draw_dropped(), strict=True):
            if is_dropped:
                x = _leave_out(layer, x)
            elif again:
                x = checkpoint(layer, x, mask, context, use_reentrant=False)
            else:
                x = layer(x, mask, context)
            yield x

    def _draw_dropped(self) -> list[bool]:
        """Draw which layers are left out, the same on every rank."""
        if not self.training or self.layerdrop == 0:
            return [False] * len(self.body.layers)
        dropped: list[bool] = (draw_for_step(len(self.body.layers)) < self.layerdrop).tolist()
        return dropped


def _leave_out(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x, which depends on the parameters of a layer without changing with them.

    Their gradient is zero in the place of none: DDP waits for every gradient.
    """
    total = sum(each.sum() for each in layer.parameters() if each.requires_grad)
    return x + 0 * total
