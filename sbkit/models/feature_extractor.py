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
from sbkit.models.signatures import (
    FEATURE_SIGNATURES,
    described,
    first_tensor,
    lengths_argument,
    refuse,
)
from sbkit.models.striding import Striding, as_evaluated, measure_part

NAME = "compute_features"
TRANSPOSED = (
    f"`{NAME}` must return (B, T, M), but returns {{shape}} for one utterance, and its last axis "
    "grows with the audio: (B, M, T). Transpose its last two axes."
)


class FeatureExtractor:
    """Call a part that makes features of audio, with the scale and the lengths that it takes."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._takes = lengths_argument(part.forward, part=NAME, signatures=FEATURE_SIGNATURES)
        self._scale = _scale(part)
        self._striding: Striding | None = None

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""
        with torch.autocast(audio.device.type, enabled=False):
            audio = audio.float() if self._scale == 1.0 else audio.float() * self._scale
            output = self._part(audio, **self._takes.of(audio, audio_lengths))
        if self._takes.form == "absolute":
            features, frame_lengths = _pair(output)
        else:
            features = first_tensor(output, part=NAME, signatures=FEATURE_SIGNATURES)
            _check_shape(features, audio)
            frame_lengths = self._count(audio, audio_lengths).clamp(max=features.shape[1])
        _check_shape(features, audio)
        mask = length_mask(frame_lengths, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frame_lengths

    def _count(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        if self._striding is None:
            self._striding = self._measure(audio)
        return self._striding.count(audio_lengths)

    def _measure(self, audio: Tensor) -> Striding:
        def run(samples: int) -> Tensor:
            silence = audio.new_zeros(1, samples)
            output = self._part(
                silence, **self._takes.of(silence, torch.tensor([samples], device="cpu"))
            )
            return first_tensor(output, part=NAME, signatures=FEATURE_SIGNATURES)

        with as_evaluated(self._part, audio.device):
            return measure_part(
                run, part=NAME, unit="samples", shortest=SAMPLE_RATE, transposed=TRANSPOSED
            )


def _scale(part: nn.Module) -> float:
    """Return the factor from int16's scale to that which a part declares."""
    declared: Any = getattr(part, "audio_scale", FULL_SCALE)
    if not isinstance(declared, int | float) or not declared > 0:
        raise SbkitError(
            f"`audio_scale` of `{NAME}` must be the largest amplitude that it takes, such as 1.0 "
            f"or {FULL_SCALE}, but is {declared!r}. Correct it in its class."
        )
    return declared / FULL_SCALE


def _pair(output: Any) -> tuple[Tensor, Tensor]:
    if not (
        isinstance(output, tuple)
        and len(output) == 2
        and all(isinstance(each, Tensor) for each in output)
    ):
        refuse(NAME, FEATURE_SIGNATURES, f"it takes lengths and returns {described(output)}")
    return output[0].float(), output[1]


def _check_shape(features: Tensor, audio: Tensor) -> None:
    if features.ndim != 3 or features.shape[0] != audio.shape[0]:
        came = f"it makes {described(features)} of audio of shape {tuple(audio.shape)}"
        refuse(NAME, FEATURE_SIGNATURES, came)
