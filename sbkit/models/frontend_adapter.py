"""The front-end of a model, whoever wrote it: features in, fewer frames and their lengths out.

Legend: B utterances, T frames of features, U frames after the front-end, D model width.

A front-end is told apart by its signature (`FRONT_END_SIGNATURES`). Where it takes no lengths, the
frames of an utterance are counted as the front-end counts a silent one of that length alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import BUCKETS
from sbkit.models.signatures import (
    FRONT_END_SIGNATURES,
    described,
    first_tensor,
    lengths_argument,
    refuse,
)
from sbkit.models.striding import Striding, as_evaluated, measure_part

NAME = "CNN"
SHORTEST = 100  # frames, one second; the first length that is tried
NEAR = 2  # frames that padding may add to the longest utterance, beside those to a bucket
TRANSPOSED = (
    f"`{NAME}` must return (B, U, D), but returns {{shape}}, where the last axis holds the frames: "
    "(B, D, U). Transpose its last two axes."
)


class FrontEnd:
    """Call a front-end with the lengths that it takes, and compare what it returns."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._takes = lengths_argument(part.forward, part=NAME, signatures=FRONT_END_SIGNATURES)
        self._striding: Striding | None = None

    @property
    def minds_lengths(self) -> bool:
        """Return whether it takes lengths as sbkit's do, and nothing then depends on padding."""
        return self._takes.form == "absolute"

    def __call__(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Subsample: (B, T, M), (B,) -> (B, U, D), (B,).

        Raises SbkitError when what the front-end returns has another shape.
        """
        output = self._part(features, **self._takes.of(features, frame_lengths))
        if self._takes.form == "absolute":
            x, lengths = _pair(output, features.shape[0])
            _check_lengths(x, lengths, frame_lengths)
        else:
            x = _only(output, features.shape[0])
            lengths = self._count(features, frame_lengths).clamp(max=x.shape[1])
        return x.flatten(2), lengths

    def _count(self, features: Tensor, frame_lengths: Tensor) -> Tensor:
        if self._striding is None:
            self._striding = self._measure(features)
        return self._striding.count(frame_lengths)

    def _measure(self, features: Tensor) -> Striding:
        def run(frames: int) -> Tensor:
            silence = features.new_zeros(1, frames, features.shape[-1])
            return _only(
                self._part(
                    silence, **self._takes.of(silence, torch.tensor([frames], device="cpu"))
                ),
                1,
            )

        with as_evaluated(self._part, features.device):
            return measure_part(
                run, part=NAME, unit="frames", shortest=SHORTEST, transposed=TRANSPOSED
            )


def _only(output: Any, batch: int) -> Tensor:
    x = first_tensor(output, part=NAME, signatures=FRONT_END_SIGNATURES)
    if x.ndim not in (3, 4) or x.shape[0] != batch:
        came = f"it returns {described(x)} for {batch} utterance{'s' * (batch != 1)}"
        refuse(NAME, FRONT_END_SIGNATURES, came)
    return x


def _pair(output: Any, batch: int) -> tuple[Tensor, Tensor]:
    if not (
        isinstance(output, tuple)
        and len(output) == 2
        and isinstance(output[1], Tensor)
        and output[1].shape == (batch,)
        and not output[1].is_floating_point()
    ):
        came = f"its forward takes lengths and returns {described(output)}"
        refuse(NAME, FRONT_END_SIGNATURES, came)
    return _only(output, batch), output[1]


def _check_lengths(x: Tensor, lengths: Tensor, frame_lengths: Tensor) -> None:
    """Compare lengths with the frames; on the host only, which waits for no device.

    Not while an exporter traces, for which lengths have no values.
    """
    if lengths.device.type != "cpu" or torch.compiler.is_exporting() or not len(lengths):
        return
    frames, longest = x.shape[1], int(lengths.max())
    added = NEAR + frames // BUCKETS
    if x.ndim == 3 and longest == x.shape[2] and abs(longest - frames) > added:
        refuse(
            NAME,
            FRONT_END_SIGNATURES,
            f"it returns {described(x)} with lengths up to {longest}, as (B, D, U) would have",
        )
    if longest > frames:
        undivided = frame_lengths.device.type == "cpu" and longest == int(frame_lengths.max())
        reason = ": the lengths of its input, not divided by its stride" if undivided else ""
        came = f"it returns {frames} frames and lengths up to {longest}{reason}"
        refuse(NAME, FRONT_END_SIGNATURES, came)
