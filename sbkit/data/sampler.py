"""Which utterances make a batch, on every rank, planned before anything is read.

A *step* is one batch of the optimizer. It holds at most ``batch_seconds`` of padded audio whatever
the hardware, and is dealt out to ``world_size x accumulation`` micro-batches of like length. The
plan of an epoch follows from the seed and the epoch alone, so every rank knows all of it, every
rank gets the same number of micro-batches, and another world size sees the same steps.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from sbkit.values.errors import SbkitError
from sbkit.values.units import samples_to_seconds, seconds_to_samples

LENGTH_JITTER = 0.1  # relative; neighbours in length change places, so batches differ by epoch

Lengths = Sequence[int] | npt.NDArray[np.int64]  # samples of audio, by row
MicroBatch = list[int]  # rows; a row written ~row pads an empty micro-batch and weighs nothing


class TrainSampler(Sampler[MicroBatch]):
    """Give this rank's micro-batches of one epoch after the other."""

    def __init__(
        self,
        *,
        samples: Lengths,
        batch_seconds: float,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
    ) -> None:
        self._samples = np.asarray(samples)
        self._capacity = seconds_to_samples(batch_seconds)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._accumulation = accumulation
        self._epoch, self._start = 0, 0
        _check_capacity(self._samples, batch_seconds)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its micro-batches were already seen."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[MicroBatch]:
        """Walk the steps; ``accumulation`` micro-batches in a row belong to one step."""
        return islice(self._micro_batches(), self._start, None)

    def __len__(self) -> int:
        """Count the micro-batches of the chosen epoch, those already seen included."""
        return len(self.steps()) * self._accumulation

    def steps(self) -> list[MicroBatch]:
        """Plan the epoch: the rows of every step, over all ranks."""
        random = np.random.default_rng((self._seed, self._epoch))
        spread = random.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, len(self._samples))
        order = np.argsort(self._samples * spread, kind="stable")
        steps = cut(order, self._samples, self._capacity)
        return [steps[index] for index in random.permutation(len(steps))]

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for step in self.steps():
            dealt = deal(step, self._samples, self._world_size * self._accumulation)
            yield from dealt[self._rank :: self._world_size]


class EvalSampler(Sampler[MicroBatch]):
    """Share out a split: every utterance once, whole batches, the same for any world size."""

    def __init__(
        self, *, samples: Lengths, batch_seconds: float, rank: int = 0, world_size: int = 1
    ) -> None:
        lengths = np.asarray(samples)
        longest = int(lengths.max(initial=0))
        capacity = max(seconds_to_samples(batch_seconds), longest)
        batches = cut(np.argsort(lengths, kind="stable"), lengths, capacity)
        self._batches = batches[rank::world_size]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Walk from the shortest batch to the longest."""
        return iter(self._batches)

    def __len__(self) -> int:
        """Count this rank's batches."""
        return len(self._batches)


def cut(order: Lengths, samples: Lengths, capacity: int) -> list[MicroBatch]:
    """Cut rows into runs whose padded audio, count times longest, is within ``capacity``."""
    batches: list[MicroBatch] = []
    longest = 0
    for row in order:
        longest = max(longest, int(samples[row]))
        if not batches or longest * (len(batches[-1]) + 1) > capacity:
            batches.append([])
            longest = int(samples[row])
        batches[-1].append(int(row))
    return batches


def deal(step: MicroBatch, samples: Lengths, parts: int) -> list[MicroBatch]:
    """Deal rows out by length like cards, so that the parts are alike in number and length.

    Where there are fewer rows than parts, the shortest row stands in without weight.
    """
    by_length = sorted(step, key=lambda row: (-int(samples[row]), row))
    return [by_length[part::parts] or [~by_length[-1]] for part in range(parts)]


def _check_capacity(samples: Lengths, batch_seconds: float) -> None:
    if len(samples) == 0:
        raise SbkitError(
            "The training set must hold at least one utterance, but holds none. Check "
            "--data_folder, min_seconds and max_seconds."
        )
    longest = int(np.argmax(samples))
    seconds = samples_to_seconds(int(samples[longest]))
    if seconds > batch_seconds:
        raise SbkitError(
            f"`batch_seconds` must be at least the longest utterance ({seconds:.1f} s, row "
            f"{longest}), but is {batch_seconds:g}. Raise it or lower max_seconds."
        )
