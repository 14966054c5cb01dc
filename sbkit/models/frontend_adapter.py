"""The front-end of a model, whoever wrote it: features in, fewer frames and their lengths out.

Legend: B utterances, T frames of features, U frames after the front-end, D model width.

A front-end is told apart by its signature (`FRONT_END_SIGNATURES`).
"""

from typing import Any

import torch
from torch import Tensor

from sbkit.audio.lengths import BUCKETS
from sbkit.models.signatures import FRONT_END_SIGNATURES, described, refuse
from sbkit.models.striding import StridedPart

NEAR = 2  # frames that padding may add to the longest utterance, beside those to a bucket


class FrontEnd(StridedPart):
    """Call a front-end with the lengths that it takes, and compare what it returns."""

    NAME, SIGNATURES, NDIMS = "CNN", FRONT_END_SIGNATURES, (3, 4)
    UNIT, SHORTEST = "frames", 100  # one second
    TRANSPOSED = (
        "`CNN` must return (B, U, D), but returns {shape}, where the last axis holds the frames: "
        "(B, D, U). Transpose its last two axes."
    )

    def __call__(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Subsample: (B, T, M), (B,) -> (B, U, D), (B,).

        Raises SbkitError when what the front-end returns has another shape.
        """
        output, batch = self._run(features, frame_lengths), features.shape[0]
        if self.minds_lengths:
            lengths = _lengths_in(output, batch)
            x = self._only(output, batch)
            _check_lengths(x, lengths, frame_lengths)
        else:
            x = self._only(output, batch)
            lengths = self._count(features, frame_lengths).clamp(max=x.shape[1])
        return x.flatten(2), lengths


def _lengths_in(output: Any, batch: int) -> Tensor:
    """Return the lengths (B,) beside x."""
    if not (
        isinstance(output, tuple)
        and len(output) == 2
        and isinstance(output[1], Tensor)
        and output[1].shape == (batch,)
        and not output[1].is_floating_point()
    ):
        came = f"its forward takes lengths and returns {described(output)}"
        refuse(FrontEnd.NAME, FRONT_END_SIGNATURES, came)
    return output[1]


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
            FrontEnd.NAME,
            FRONT_END_SIGNATURES,
            f"it returns {described(x)} with lengths up to {longest}, as (B, D, U) would have",
        )
    if longest > frames:
        undivided = frame_lengths.device.type == "cpu" and longest == int(frame_lengths.max())
        reason = ": the lengths of its input, not divided by its stride" if undivided else ""
        came = f"it returns {frames} frames and lengths up to {longest}{reason}"
        refuse(FrontEnd.NAME, FRONT_END_SIGNATURES, came)
