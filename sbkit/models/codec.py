"""The quantizer of a codec, and the codec as one model.

Legend: B utterances, S samples, T frames of a hop, U frames of codes (two hops), F frequencies,
M mel bins, D model width, G codebooks, L levels of each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.models.code_space import CodeSpace
from sbkit.models.vocoder import LogMel, VocoderDecoder, VocoderEncoder


class FiniteScalarQuantizer(nn.Module):
    """Round each of a few channels to one of its levels; a code is a combination of levels.

    There is no table of codes: a code is a number whose digits are the levels.
    Source: Mentzer et al. 2023 (arXiv 2309.15505).
    """

    counts: Tensor
    basis: Tensor

    def __init__(self, *, d_model: int, groups: int, levels: Sequence[int]) -> None:
        super().__init__()
        self.space = space = CodeSpace(groups, tuple(levels))
        self.to_levels = nn.Linear(d_model, groups * len(levels))
        self.from_levels = nn.Linear(groups * len(levels), d_model)
        counts = torch.tensor(space.levels)
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("basis", counts.cumprod(0) // counts, persistent=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Round states, with the gradient of the unrounded ones: (B, U, D) -> same, (B, U, G)."""
        x = self.to_levels(states).float().unflatten(2, (self.space.groups, -1))  # (B, U, G, L)
        half, offset = (self.counts - 1) / 2, (1 - self.counts % 2) / 2
        width = half * 1.001  # otherwise the outermost levels are never reached
        bounded = (x + (offset / width).atanh()).tanh() * width - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = (rounded.detach() + half + offset).round().long()
        return self._states(rounded + offset), (digits * self.basis).sum(3)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the states of checked codes: (B, U, G) -> (B, U, D)."""
        digits = codes.unsqueeze(3) // self.basis % self.counts  # (B, U, G, L)
        return self._states(digits - (self.counts - 1) / 2)

    def _states(self, levels: Tensor) -> Tensor:
        return self.from_levels((levels * 2 / (self.counts - 1)).flatten(2))


class CodecModel:
    """A codec as one model: encoder, quantizer and decoder."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: LogMel,
        encoder: VocoderEncoder,
        quantizer: FiniteScalarQuantizer,
        decoder: VocoderDecoder,
    ) -> None:
        self.model, self.features = model, compute_features
        self.encoder, self.quantizer, self.decoder = encoder, quantizer, decoder

    @property
    def settings(self) -> dict[str, object]:
        space = self.quantizer.space
        return {
            "groups": space.groups,
            "levels": space.levels,
            "frame": self.features.frame,
            "encoder_context": self.encoder.context,
            "decoder_context": self.decoder.context,
        }

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Code audio between -1 and 1, and decode it: (B, S), (B,) -> (B, S), (B, U, G), (B,)."""
        states, codes, frames, mask = self._quantize(audio, lengths)
        return self.decoder(states, mask)[:, : audio.shape[1]], codes, frames

    def encode(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Code audio between -1 and 1: (B, S), (B,) -> (B, U, G), (B,); zero past the lengths."""
        _, codes, frames, mask = self._quantize(audio, lengths)
        return codes * mask.long(), frames

    def decode(self, codes: Tensor) -> tuple[Tensor]:
        """Decode checked codes: (B, U, G) -> (B, S)."""
        mask = torch.ones_like(codes[:, :, :1], dtype=torch.float32)
        return (self.decoder(self.quantizer.decode(codes), mask),)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Code audio in the scale of int16, and decode it: (B, S), (B,) -> (B, S)."""
        return self.forward(audio / FULL_SCALE, audio_lengths)[0]

    def _quantize(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(audio.device.type, enabled=False):
            features, frames = self.features(audio.float(), lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2).float()
        states, codes = self.quantizer(self.encoder(features, mask))
        return states, codes, frames, mask
