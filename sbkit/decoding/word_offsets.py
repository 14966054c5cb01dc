"""From the frames of a word's tokens to when it is said.

CTC writes a token in one or two of the frames in which it is heard, so that a word begins before
its first token and ends after its last. Where a pause is before or after it, two numbers say by how
much, which are fitted where the truth is known; without a pause, two words meet in the middle.

Legend: U frames, N words, step: samples from a frame to the next.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.decoding.alignment import TimedWord

MOST = 25.0  # frames: a second of 40 ms each


@dataclass(frozen=True)
class WordOffsets:
    """How far a word reaches beyond its tokens where a pause is, in frames.

    start: added to its first frame, mostly below zero; end: added to the frame after its last.
    Raises SbkitError for what is no number, or more than a second.
    """

    start: float = -1.2
    end: float = 3.05

    def __post_init__(self) -> None:
        """Refuse what no fit gives."""
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not -MOST <= value <= MOST:
                raise SbkitError(
                    f"`word_offsets.{name}` must be a number of frames from {-MOST:g} to {MOST:g}, "
                    f"but is {str(value)[:60]!r}. Fit it: python -m tools.bench_times BUNDLE DATA "
                    "--fit"
                )

    @classmethod
    def of(cls, value: Any) -> "WordOffsets":
        """Return those of a mapping; the default ones for None.

        Raises SbkitError for what has other keys than start and end.
        """
        if value is None:
            return cls()
        if not isinstance(value, dict) or set(value) != {"start", "end"}:
            raise SbkitError(
                f"`word_offsets` must have the keys start and end, but is {str(value)[:60]!r}. "
                "Export the run again."
            )
        return cls(**value)

    def place(
        self, words: Sequence[TimedWord], *, samples: int, step: int
    ) -> list[tuple[int, int]]:
        """Return the first sample of each word, and the one after its last.

        No word overlaps another, or leaves the clip, which has ``samples``.
        """
        first = np.array([word.first for word in words], np.float64)
        end = np.array([word.end for word in words], np.float64)
        bounds = np.stack([first + self.start, end + self.end], axis=1)  # (N, 2)
        near = bounds[1:, 0] < bounds[:-1, 1]
        bounds[1:, 0][near] = bounds[:-1, 1][near] = ((end[:-1] + first[1:]) / 2)[near]
        bounds = np.rint(step * bounds).clip(0, samples)
        rising = np.maximum.accumulate(bounds.ravel()).reshape(-1, 2)
        return [(int(begin), int(after)) for begin, after in rising]
