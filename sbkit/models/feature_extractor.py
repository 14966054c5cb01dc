"""The features of audio, whoever computes them.

Legend: B utterances, S samples, T frames, M features of a frame.

A feature extractor is told apart by its signature (`FEATURE_SIGNATURES`). It is given audio in the
scale of int16, -32768 to 32767, as Kaldi has it; one that wants another declares it by an attribute
of its class: with ``audio_scale = 1.0`` it is given audio between -1 and 1, as wav2vec 2 wants it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.signatures import FEATURE_SIGNATURES, described, refuse
from sbkit.models.striding import StridedPart

NAME = "compute_features"


class FeatureExtractor(StridedPart):
    """Call a part that makes features of audio, with the scale and the lengths that it takes."""

    NAME, SIGNATURES, NDIMS = NAME, FEATURE_SIGNATURES, (3,)
    UNIT, SHORTEST = "samples", SAMPLE_RATE
    TRANSPOSED = (
        f"`{NAME}` must return (B, T, M), but returns {{shape}} for one utterance, and its last "
        "axis grows with the audio: (B, M, T). Transpose its last two axes."
    )

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self._scale = _scale(part)

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""
        with torch.autocast(audio.device.type, enabled=False):
            audio = audio.float() if self._scale == 1.0 else audio.float() * self._scale
            output = self._run(audio, audio_lengths)
        features = self._only(output, audio.shape[0])
        if self.minds_lengths:
            features, frame_lengths = features.float(), _lengths_in(output)
        else:
            frame_lengths = self._count(audio, audio_lengths).clamp(max=features.shape[1])
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths


def _scale(part: nn.Module) -> float:
    """Return the factor from int16's scale to that which a part declares."""
    declared: Any = getattr(part, "audio_scale", FULL_SCALE)
    if not isinstance(declared, int | float) or not declared > 0:
        raise SbkitError(
            f"`audio_scale` of `{NAME}` must be the largest amplitude that it takes, such as 1.0 "
            f"or {FULL_SCALE}, but is {declared!r}. Correct it in its class."
        )
    return declared / FULL_SCALE


def _lengths_in(output: Any) -> Tensor:
    """Return the lengths (B,) beside the features."""
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor)):
        refuse(NAME, FEATURE_SIGNATURES, f"it takes lengths and returns {described(output)}")
    return output[1]
