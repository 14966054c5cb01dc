"""Plan which utterances make a batch, on every rank, before anything is read.

A *step* is one batch of the optimizer. It holds at most ``batch_seconds`` of padded audio whatever
the hardware, and is dealt out to ``world_size x accumulation`` micro-batches of like length. The
plan of an epoch, joins and speeds included, follows from the seed and the epoch alone, so every
rank knows all of it, every rank gets the same number of micro-batches, and another world size sees
the same steps.

Audio in shards is taken window by window: a few shards, drawn anew in every epoch, are shuffled as
if they were the whole corpus, then the next few. So only the shards of a window are being read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds, seconds_to_samples
from sbkit.config.ranges import SHARE, Range
from sbkit.data.plan import Examples, MicroBatch, Plan, join_rows

LENGTH_JITTER = 0.02  # relative; neighbours in length change places, so batches differ by epoch
LONG_ENOUGH = 10.0  # seconds; what is joined grows no further; attention is quadratic

Lengths = Sequence[int] | npt.NDArray[np.int64]  # samples of audio, by row


class TrainSampler(Sampler[MicroBatch]):
    """Return this rank's micro-batches of one epoch after the other.

    An utterance is joined to the next one drawn with probability ``concat_prob``, which puts words
    into more contexts than the few sentences of a small corpus do, and is played at one of the
    ``speeds``. ``shards`` are the numbers of the shards of the rows, of which
    ``shuffle_shards`` are shuffled together.
    """

    RANGES: ClassVar = {
        "concat_prob": SHARE,
        "batch_seconds": Range(low=0, word="auto", advice="Pass auto for what fits into memory."),
    }

    def __init__(
        self,
        *,
        samples: Lengths,
        batch_seconds: float,
        seed: int,
        concat_prob: float = 0.0,
        speeds: Sequence[float] = (1.0,),
        shards: Lengths | None = None,
        shuffle_shards: int = 8,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        self._samples = np.asarray(samples)
        self._shards = np.zeros_like(self._samples) if shards is None else np.asarray(shards)
        self._shuffle_shards = shuffle_shards
        self._capacity = seconds_to_samples(batch_seconds, sample_rate)
        self._long_enough = seconds_to_samples(LONG_ENOUGH, sample_rate)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._accumulation = accumulation
        self._concat_prob, self._percents = concat_prob, to_percents(speeds)
        self._epoch, self._start = 0, 0
        self._planned: tuple[int, Plan] | None = None
        _check_capacity(self._samples, batch_seconds, sample_rate)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its micro-batches were already seen."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's batches; ``accumulation`` micro-batches in a row belong to one step."""
        return islice(self._micro_batches(), self._start, None)

    def __len__(self) -> int:
        """Count the micro-batches of the chosen epoch, those already seen included."""
        return len(self.steps()) * self._accumulation

    def steps(self) -> Plan:
        """Plan the epoch: the examples of every step, over all ranks."""
        if self._planned is None or self._planned[0] != self._epoch:
            self._planned = self._epoch, self._plan()
        return self._planned[1]

    def _plan(self) -> Plan:
        """Join rows in random order, at random speeds, and batch them by length.

        Lengths rise in one window and fall in the next, so that a batch over their border is of
        like ones, too.
        """
        random = np.random.default_rng((self._seed, self._epoch))
        count = len(self._samples)
        windows, order = self._windows(), random.permutation(count)
        examples = join_rows(
            self._samples,
            order=order[np.argsort(windows[order], kind="stable")],
            percents=random.choice(self._percents, count),
            joins=random.random(count) < self._concat_prob,
            capacity=self._capacity,
            long_enough=self._long_enough,
        )
        spread = random.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, len(examples))
        windows = windows[examples.rows[examples.starts[:-1]]]
        lengths = examples.samples * spread * np.where(windows % 2, -1, 1)
        order = np.lexsort((lengths, windows))
        return Plan(examples, order, self._capacity).shuffle(random, windows)

    def _windows(self) -> npt.NDArray[np.int64]:
        """Return the window that every row is in, which is where its shard comes in this epoch."""
        numbers = np.unique(self._shards)
        random = np.random.default_rng((self._seed, self._epoch, len(numbers)))
        places = random.permutation(len(numbers)) // self._shuffle_shards
        windows: npt.NDArray[np.int64] = places[np.searchsorted(numbers, self._shards)]
        return windows

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for step in self.steps():
            dealt = split_batch(step, self._world_size * self._accumulation)
            yield from dealt[self._rank :: self._world_size]


class EvalSampler(Sampler[MicroBatch]):
    """Share out a split: every utterance once, whole batches, the same for any world size."""

    def __init__(
        self,
        *,
        samples: Lengths,
        batch_seconds: float,
        rank: int = 0,
        world_size: int = 1,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        lengths = np.asarray(samples)
        longest = int(lengths.max(initial=0))
        capacity = max(seconds_to_samples(batch_seconds, sample_rate), longest)
        order = np.argsort(lengths, kind="stable")
        self._plan = Plan(Examples.alone(lengths), order, capacity)
        self._own = range(rank, len(self._plan), world_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield from the shortest batch to the longest."""
        return map(self._plan.__getitem__, self._own)

    def __len__(self) -> int:
        """Count this rank's batches."""
        return len(self._own)


def to_percents(speeds: Sequence[float]) -> list[int]:
    """Write speeds in percent: small integers make a small resampling kernel.

    Raises SbkitError for what is no positive number with at most two decimals.
    """
    try:
        percents = [round(100 * speed) for speed in speeds]
        fits = bool(percents) and [each / 100 for each in percents] == list(speeds)
    except (TypeError, ValueError, OverflowError):  # no list, or no numbers in it
        percents, fits = [], False
    if not fits or min(percents) <= 0:
        raise SbkitError(
            "`speeds` must be a list of one or more positive numbers with at most two decimals, "
            f"but is {speeds!r}. Write [1.0] to leave the speed alone."
        )
    return percents


def fastest_percent(speeds: Sequence[float]) -> int:
    """Return the speed, natural or one of these, that leaves the fewest samples."""
    return max(100, *to_percents(speeds))


def split_batch(step: MicroBatch, parts: int) -> list[MicroBatch]:
    """Deal examples to the parts in turn, the longest first: they are alike in number and length.

    Where there are fewer examples than parts, the shortest one fills the others, without weight.
    """
    by_length = sorted(step, key=lambda each: (-each.samples, each.rows))
    filler = replace(by_length[-1], weight=0)
    return [by_length[part::parts] or [filler] for part in range(parts)]


def _check_capacity(samples: Lengths, batch_seconds: float, sample_rate: int) -> None:
    if len(samples) == 0:
        raise SbkitError(
            "The training set must hold at least one utterance, but holds none. Check "
            "--data_folder, min_seconds and max_seconds."
        )
    longest = int(np.argmax(samples))
    seconds = samples_to_seconds(int(samples[longest]), sample_rate)
    if seconds > batch_seconds:
        raise SbkitError(
            f"`batch_seconds` must be at least the longest utterance ({seconds:.1f} s, row "
            f"{longest}), but is {batch_seconds:g}. Raise it or lower max_seconds."
        )
