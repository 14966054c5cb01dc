"""The quantizer of a codec, and the codec as one model.

Legend: B utterances, S samples, U frames of codes, D model width, G codebooks, L channels of a
codebook.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.base.ranges import ListOf, PositiveCount, Range
from sbkit.models.spectral_losses import mel_distance
from sbkit.models.vocoder import LogMel, VocoderDecoder, VocoderEncoder
from sbkit.tasks.codec.codes import CodeSpace


class FiniteScalarQuantizer(nn.Module):
    """Round each channel of a codebook to one of its levels.

    A code is a number with a digit for each channel: the index of the channel's level. So no table
    of codes is needed.
    Source: Mentzer et al. 2023 (arXiv 2309.15505).

    levels: the number of levels of each channel.
    """

    levels: Tensor
    place_values: Tensor

    def __init__(
        self,
        *,
        d_model: PositiveCount,
        groups: PositiveCount,
        levels: Annotated[
            Sequence[int],
            ListOf(
                item=Range(low=2, high=1 << 16, integer=True),
                may_be_empty=False,
                advice="[8, 5, 5, 5] is usual.",
            ),
        ],
    ) -> None:
        super().__init__()
        self.space = space = CodeSpace(groups, tuple(levels))
        self.to_levels = nn.Linear(d_model, groups * len(levels))
        self.from_levels = nn.Linear(groups * len(levels), d_model)
        num_levels = torch.tensor(space.levels)
        place_values = num_levels.cumprod(0) // num_levels  # of the digits of a code
        self.register_buffer("levels", num_levels, persistent=False)
        self.register_buffer("place_values", place_values, persistent=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantized states and their codes: (B, U, D) -> (B, U, D), (B, U, G).

        Rounding passes the gradient through unchanged.
        """
        x = self.to_levels(states).float().unflatten(2, (self.space.groups, -1))  # (B, U, G, L)
        half = (self.levels - 1) / 2
        offset = (1 - self.levels % 2) / 2  # an even number of levels lies between whole numbers
        # With exactly `half`, a channel of two levels would be shifted by atanh(1), infinity.
        half_range = half * 1.001
        bounded = (x + (offset / half_range).atanh()).tanh() * half_range - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = (rounded.detach() + half + offset).round().long()
        return self._project(rounded + offset), (digits * self.place_values).sum(3)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the states of checked codes: (B, U, G) -> (B, U, D)."""
        digits = codes.unsqueeze(3) // self.place_values % self.levels  # (B, U, G, L)
        return self._project(digits - (self.levels - 1) / 2)

    def _project(self, centered_digits: Tensor) -> Tensor:
        """Scale digits to between -1 and 1, and project them to states."""
        return self.from_levels((centered_digits * 2 / (self.levels - 1)).flatten(2))


class CodedBatch(NamedTuple):
    """Audio, and audio decoded from its codes; both are zero past the lengths."""

    audio: Tensor  # (B, S) between -1 and 1
    lengths: Tensor  # (B,)
    decoded: Tensor  # (B, S)
    codes: Tensor  # (B, U, G), arbitrary past the frames
    num_frames: Tensor  # (B,)
    mel_distance_sum: Tensor  # (B,) over frames
    space: CodeSpace


@dataclass(eq=False, kw_only=True)
class CodecModel:
    """A codec as one model: encoder, quantizer and decoder."""

    model: nn.ModuleList
    compute_features: LogMel
    encoder: VocoderEncoder
    quantizer: FiniteScalarQuantizer
    decoder: VocoderDecoder

    @property
    def settings(self) -> dict[str, object]:
        space = self.quantizer.space
        return {
            "groups": space.groups,
            "levels": space.levels,
            "frame": self.compute_features.frame_samples,
            "encoder_context": self.encoder.context,
            "decoder_context": self.decoder.context,
        }

    def encode(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode audio: (B, S), (B,) -> (B, U, G), (B,).

        The audio is between -1 and 1. The codes past an utterance's length are zero.
        """
        _, codes, frames, mask = self._quantize(audio, lengths)
        return codes * mask.long(), frames

    def decode(self, codes: Tensor) -> tuple[Tensor]:
        """Decode checked codes: (B, U, G) -> (B, S)."""
        mask = torch.ones_like(codes[:, :, :1], dtype=torch.float32)
        return (self.decoder(self.quantizer.decode(codes), mask),)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> CodedBatch:
        """Encode audio in the scale of int16, decode it with a mask, and compare: (B, S), (B,)."""
        audio = audio / FULL_SCALE
        states, codes, frames, mask = self._quantize(audio, audio_lengths)
        decoded = self.decoder(states, mask)[:, : audio.shape[1]]
        decoded = decoded * length_mask(audio_lengths, audio.shape[1], audio.device)
        distance = mel_distance(self.compute_features, decoded, audio, audio_lengths)
        space = self.quantizer.space
        return CodedBatch(audio, audio_lengths, decoded, codes, frames, distance, space)

    def _quantize(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return quantized states, codes, the number of frames (B,), and their mask (B, U, 1)."""
        with torch.autocast(audio.device.type, enabled=False):
            features, frames = self.compute_features(audio.float(), lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2).float()
        states, codes = self.quantizer(self.encoder(features, mask))
        return states, codes, frames, mask
