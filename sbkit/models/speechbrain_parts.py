"""SpeechBrain's modules as parts of an encoder, with the names of their weights.

Legend: B utterances, U frames of the encoder, L tokens, D model width.

SpeechBrain's lengths are fractions of the longest, and most of its layers see the padding.
"""

import warnings
from typing import Any, ClassVar, Literal

import torch
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.containers import LengthsCapableSequential
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, to_relative
from sbkit.base.ranges import Count, Dropout, PositiveCount

NO_TOKEN = -1


class SpeechBrainLayers(LengthsCapableSequential):  # type: ignore[misc]
    """Call layers one after another, with lengths if they take them: (B, T, ...), (B,) -> same.

    subsampling, offset: n inputs have (n + offset) // subsampling frames. The default suits layers
        that are padded, whose last frame may be incomplete.
    layers: by their names, in order.
    """

    sees_padding = True

    def __init__(
        self, *, subsampling: int = 1, offset: int | None = None, **layers: nn.Module
    ) -> None:
        super().__init__(**layers)
        self.subsampling = Subsampling(subsampling, subsampling - 1 if offset is None else offset)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x, _fractions(x, lengths))
        return y.flatten(2), self.subsampling.count(lengths)


class SpeechBrainTransformer(TransformerASR):  # type: ignore[misc]
    """SpeechBrain's Transformer with a decoder: (B, U, D), (B,) -> (B, U, D), (B,)."""

    sees_padding = True
    decoding_modules = ("custom_tgt_module", "decoder")
    ARGUMENTS: ClassVar = {
        **dict.fromkeys(("input_size", "d_model", "nhead", "d_ffn"), PositiveCount),
        **dict.fromkeys(("num_encoder_layers", "kernel_size"), PositiveCount),
        "num_decoder_layers": Count,
        "encoder_module": Literal["conformer", "branchformer", "transformer"],
        "attention_type": Literal["regularMHA", "RelPosMHAXL", "RoPEMHA", "hypermixing"],
        "dropout": Dropout,
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Its decoder passes PyTorch a bool mask and a float mask.
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(x, _fractions(x, lengths)), lengths

    def encode_and_decode(
        self, x: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, and decode with gradients, which SpeechBrain's `decode` lacks."""
        # The decoder is causal, so no token sees the padding after it.
        states, decoded = super().forward(x, tokens, _fractions(x, lengths), NO_TOKEN)
        return states, lengths, decoded

    @torch.no_grad()
    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        decoded, _ = super().decode(tokens, states, lengths.to(states.device, non_blocking=True))
        return decoded


def _fractions(x: Tensor, lengths: Tensor) -> Tensor:
    return to_relative(lengths, x.shape[1]).to(x.device, non_blocking=True)
