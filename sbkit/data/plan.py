"""The batches of an epoch, as a few arrays of numbers.

A corpus of two million rows has a plan of 64 MB, made in seconds; the examples of a batch become
objects when it is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from sbkit.base.units import at_speed

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance of a batch: rows one after another, at one speed.

    samples: its length at that speed; percent: of the natural speed; weight: 0 where it only fills
    a rank's empty share.
    """

    rows: tuple[int, ...]
    samples: int
    percent: int = 100
    weight: int = 1


MicroBatch = list[Example]


@dataclass(frozen=True, eq=False)
class Examples:
    """Many examples, in columns.

    rows: (N,) those of all examples; starts: (E + 1,) where those of each begin; samples (E,) and
    percents (E,) as in `Example`.
    """

    rows: Counts
    starts: Counts
    samples: Counts
    percents: Counts

    @classmethod
    def alone(cls, samples: Counts) -> Self:
        """Make an example of every row, at its own speed."""
        count = len(samples)
        return cls(np.arange(count), np.arange(count + 1), samples, np.full(count, 100))

    def __getitem__(self, index: int) -> Example:
        """Make one of them."""
        rows = self.rows[self.starts[index] : self.starts[index + 1]].tolist()
        return Example(tuple(rows), int(self.samples[index]), int(self.percents[index]))

    def __len__(self) -> int:
        """Count them."""
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

    An example has the speed of its first row, or the natural one where that row, played slower,
    would not fit into a batch of ``capacity`` samples; it grows until it is ``long_enough``, and
    never beyond the capacity.
    """
    alone = at_speed(samples[order], percents)
    percents = np.where(alone <= capacity, percents, 100)
    alone = np.where(alone <= capacity, alone, samples[order])
    starts, totals = list[int](), list[int]()
    total, percent = capacity, 100  # nothing is joined to the first
    rows = zip(samples[order].tolist(), alone.tolist(), percents.tolist(), joins, strict=True)
    for place, (natural, own_total, own_percent, join) in enumerate(rows):
        longer = total + at_speed(natural, percent)
        if starts and join and total < long_enough and longer <= capacity:
            total = totals[-1] = longer
        else:
            total, percent = own_total, own_percent
            starts.append(place)
            totals.append(total)
    firsts = np.array(starts, dtype=np.int64)
    return Examples(order, np.append(firsts, len(order)), np.array(totals), percents[firsts])


class Plan:
    """Batches of examples that are alike in length: a sequence of them.

    Each is a run of the examples in an order, cut where the padded audio, count times longest,
    would be more than ``capacity`` samples.
    """

    def __init__(self, examples: Examples, order: Counts, capacity: int) -> None:
        self._examples, self._order = examples, order
        self._ends = np.array(cut_runs(examples.samples[order].tolist(), capacity), dtype=np.int64)
        self._shuffled = np.arange(len(self._ends))

    def shuffle(self, random: np.random.Generator, windows: Counts) -> Self:
        """Bring the batches into a random order, within the windows of their first examples."""
        self._shuffled = random.permutation(len(self._ends))
        first = self._order[np.append(0, self._ends)[self._shuffled]]
        self._shuffled = self._shuffled[np.argsort(windows[first], kind="stable")]
        return self

    def __getitem__(self, index: int) -> MicroBatch:
        """Make the examples of a batch."""
        place = int(self._shuffled[index])
        first = self._ends[place - 1] if place else 0
        return [self._examples[each] for each in self._order[first : self._ends[place]].tolist()]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield one batch after the other."""
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        """Count the batches."""
        return len(self._ends)


def cut_runs(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return where each run of lengths ends whose count times longest is within ``capacity``."""
    ends = list[int]()
    count = longest = 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > capacity:
            ends.append(place)
            count, longest = 0, length
        count += 1
    return [*ends, len(lengths)] if count else ends
