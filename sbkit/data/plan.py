"""The batches of an epoch, as a few arrays of numbers.

A corpus of two million rows has a plan of 64 MB, made in seconds; the examples of a batch become
objects when it is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from sbkit.base.arrays import Counts
from sbkit.base.units import at_speed


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance of a batch: rows one after another, at one speed.

    Attributes:
        rows: indices in the split.
        samples: its length at that speed.
        percent: of the natural speed.
        weight: 0 if it only fills a rank's empty share.
    """

    rows: tuple[int, ...]
    samples: int
    percent: int = 100
    weight: int = 1


MicroBatch = list[Example]


@dataclass(frozen=True, eq=False)
class Examples:
    """Many examples, in columns."""

    rows: Counts  # (N,) of all examples
    starts: Counts  # (E + 1,) where the rows of each example start
    samples: Counts  # (E,) as in `Example`
    percents: Counts  # (E,) as in `Example`

    @classmethod
    def of_single_rows(cls, samples: Counts) -> Self:
        """Make an example of every row, at the natural speed."""
        count = len(samples)
        return cls(np.arange(count), np.arange(count + 1), samples, np.full(count, 100))

    def __getitem__(self, index: int) -> Example:
        rows = self.rows[self.starts[index] : self.starts[index + 1]].tolist()
        return Example(tuple(rows), int(self.samples[index]), int(self.percents[index]))

    def __len__(self) -> int:
        return len(self.samples)


def join_rows(
    samples: Counts,
    order: Counts,
    percents: Counts,
    joins: npt.NDArray[np.bool_],
    *,
    capacity: int,
    long_enough: int,
) -> Examples:
    """Make examples of rows in an order, each joined to the one before it where `joins` says so.

    An example has the speed of its first row, or the natural one if that row, played slower, would
    not fit into a batch of ``capacity`` samples. It grows until it has ``long_enough`` samples, and
    never beyond the capacity.
    """
    played = at_speed(samples[order], percents)
    percents = np.where(played <= capacity, percents, 100)
    played = np.where(played <= capacity, played, samples[order])
    starts: list[int] = []
    totals: list[int] = []
    total, percent = capacity, 100  # nothing is joined to the first
    rows = zip(samples[order].tolist(), played.tolist(), percents.tolist(), joins, strict=True)
    for index, (natural, row_samples, row_percent, join) in enumerate(rows):
        longer = total + at_speed(natural, percent)
        if starts and join and total < long_enough and longer <= capacity:
            total = totals[-1] = longer
        else:
            total, percent = row_samples, row_percent
            starts.append(index)
            totals.append(total)
    firsts = np.array(starts, dtype=np.int64)
    return Examples(order, np.append(firsts, len(order)), np.array(totals), percents[firsts])


class Plan:
    """A sequence of batches of examples of similar length.

    Each is a run of the examples in an order, cut where the padded audio, count times longest,
    would exceed ``capacity`` samples.
    """

    def __init__(self, examples: Examples, order: Counts, capacity: int) -> None:
        self._examples, self._order = examples, order
        self._ends = np.array(cut_runs(examples.samples[order].tolist(), capacity), dtype=np.int64)
        self._shuffled = np.arange(len(self._ends))

    def shuffle(self, random: np.random.Generator, windows: Counts) -> Self:
        """Shuffle the batches within the windows of their first examples."""
        self._shuffled = random.permutation(len(self._ends))
        first = self._order[np.append(0, self._ends)[self._shuffled]]
        self._shuffled = self._shuffled[np.argsort(windows[first], kind="stable")]
        return self

    def __getitem__(self, index: int) -> MicroBatch:
        run = int(self._shuffled[index])
        first = self._ends[run - 1] if run else 0
        return [self._examples[i] for i in self._order[first : self._ends[run]].tolist()]

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._ends)


def cut_runs(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return where each run of lengths ends, such that count times longest is within ``capacity``.

    >>> cut_runs([1, 1, 2, 2, 9, 1], 4)
    [2, 4, 5, 6]
    """
    ends: list[int] = []
    count = longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > capacity:
            ends.append(index)
            count, longest = 0, length
        count += 1
    return [*ends, len(lengths)] if count else ends
