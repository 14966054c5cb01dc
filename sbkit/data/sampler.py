"""Plan the utterances of all batches, on all ranks, before anything is read.

A *step* is one batch of the optimizer, dealt to ``world_size x accumulation`` micro-batches of
similar length. The plan of an epoch depends only on the seed and the epoch, so every rank knows all
of it, and another world size sees the same steps.

Audio in shards is read window by window: a few shards, drawn anew in every epoch, are shuffled as
if they were the whole corpus. With a mix, every window has an equal share of each source, and there
are more windows if a source repeats, so that a batch rarely has the same utterance twice.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler

from sbkit.base.arrays import Bools, Counts
from sbkit.base.errors import ConfigError, concerning
from sbkit.base.units import SAMPLE_RATE, at_speed, samples_to_seconds, seconds_to_samples
from sbkit.data.mix import MixSource
from sbkit.distributed.ranks import gather_over_ranks


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance of a batch: rows one after another, at one speed."""

    rows: tuple[int, ...]  # indices in the split
    samples: int  # length at that speed
    percent: int = 100  # of the natural speed
    weight: int = 1  # 0 if it only fills a rank's empty share


MicroBatch = list[Example]


@runtime_checkable
class StepSampler(Protocol):
    """A plan of the steps of each epoch; sbkit deals them to ranks and micro-batches, and resumes.

    seed: of the run; together with the epoch, it decides all random choices of `steps`.
    """

    seed: int

    def set_epoch(self, epoch: int, /) -> None:
        """Choose the epoch, counted from 1."""

    def steps(self) -> Sequence[MicroBatch]:
        """Return the examples of each step, of all ranks together."""


@runtime_checkable
class StatefulSampler(StepSampler, Protocol):
    """A sampler whose plans also depend on what was trained, such as the losses of utterances.

    Its state is saved with each checkpoint. All processes must plan the same steps, so whatever
    one of them has seen is gathered first (`sbkit.distributed.ranks.gather_over_ranks`).
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, texts and tensors, in lists and dictionaries."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Replace the state by one of `state_dict`."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Many examples, in columns."""

    rows: Counts  # (N,) of all examples
    starts: Counts  # (E + 1,) where the rows of each example start
    samples: Counts  # (E,) as in `Example`
    percents: Counts  # (E,)

    def __getitem__(self, index: int) -> Example:
        rows = self.rows[self.starts[index] : self.starts[index + 1]].tolist()
        return Example(tuple(rows), int(self.samples[index]), int(self.percents[index]))

    def __len__(self) -> int:
        return len(self.samples)


def join_rows(
    samples: Counts,
    order: Counts,
    percents: Counts,
    is_joined: Bools,
    *,
    capacity: int,
    target_samples: int,
) -> Examples:
    """Make examples of rows in an order; ``is_joined`` asks to join a row to its predecessor.

    An example has the speed of its first row, or the natural speed if that row, played slower,
    would not fit into a batch of ``capacity`` samples. It grows until it has ``target_samples``,
    and never beyond the capacity.
    """
    starts, lengths, speeds = array("i"), array("i"), array("h")
    percent, total = 100, target_samples  # nothing precedes the first row
    natural = samples[order]
    # The items of memoryviews are Python numbers, which are made faster than those of arrays.
    columns = (natural.data, at_speed(natural, percents).data, percents.data, is_joined.data)
    for row, (length, played, drawn, may_join) in enumerate(zip(*columns, strict=True)):
        may_grow = may_join and total < target_samples
        if may_grow and (joined := total + at_speed(length, percent)) <= capacity:
            lengths[-1] = total = joined
        else:
            percent, total = (drawn, played) if played <= capacity else (100, length)
            starts.append(row)
            lengths.append(total)
            speeds.append(percent)
    starts.append(len(order))
    return Examples(order.astype(np.int32), *map(np.array, (starts, lengths, speeds)))


class Plan(Sequence[MicroBatch]):
    """Batches of examples of similar length.

    A batch ends where the padded audio, count times longest, would exceed ``capacity`` samples.
    """

    def __init__(self, examples: Examples, order: Counts, capacity: int) -> None:
        self._examples = examples
        self._order = order
        blocks = (order[start : start + PLAN_ROWS] for start in range(0, len(order), PLAN_ROWS))
        lengths = chain.from_iterable(examples.samples[rows].tolist() for rows in blocks)
        self._ends = np.array(cut_runs(lengths, capacity), dtype=np.int64)
        self._shuffled = np.arange(len(self._ends))

    def shuffle(self, random: np.random.Generator, windows: Counts) -> Self:
        self._shuffled = random.permutation(len(self._ends))
        first = self._order[np.append(0, self._ends)[self._shuffled]]
        self._shuffled = self._shuffled[np.argsort(windows[first], kind="stable")]
        return self

    @property
    def sizes(self) -> Counts:
        return np.diff(self._ends, prepend=0)[self._shuffled]

    def padded_samples(self, share: int, num_shares: int) -> Counts:
        """Count the samples, with padding, of one share of each batch, dealt by `split_batch`."""
        sizes = np.diff(self._ends, prepend=0)
        lengths = self._examples.samples[self._order].astype(np.int64)
        batch_of = np.repeat(np.arange(len(sizes)), sizes)
        lengths = lengths[np.lexsort((-lengths, batch_of))]  # of each batch, the longest first
        longest = lengths[np.where(share < sizes, self._ends - sizes + share, self._ends - 1)]
        counts = np.maximum(1, -(-(sizes - share) // num_shares))
        padded: Counts = (longest * counts)[self._shuffled]
        return padded

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        run = int(self._shuffled[index])
        first = self._ends[run - 1] if run else 0
        return [self._examples[i] for i in self._order[first : self._ends[run]].tolist()]

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._ends)


def step_sizes(steps: Sequence[MicroBatch]) -> Counts:
    """Count the examples of each step."""
    return steps.sizes if isinstance(steps, Plan) else np.array([len(step) for step in steps])


def padded_share(steps: Sequence[MicroBatch], share: int, num_shares: int) -> Counts:
    """Count the samples, with padding, of one share of each step, dealt by `split_batch`."""
    if isinstance(steps, Plan):
        return steps.padded_samples(share, num_shares)
    return np.array([padded_samples(split_batch(step, num_shares)[share]) for step in steps])


def padded_samples(batch: MicroBatch) -> int:
    """Count the samples of a batch with its padding."""
    return len(batch) * max(example.samples for example in batch)


def cut_runs(lengths: Iterable[int], capacity: int) -> list[int]:
    """Return where runs of lengths end, such that count times longest is within ``capacity``.

    >>> cut_runs([1, 1, 2, 2, 9, 1], 4)
    [2, 4, 5, 6]
    """
    ends: list[int] = []
    count = longest = total = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > capacity:
            ends.append(index)
            count = 0
            longest = length
        count += 1
        total = index + 1
    return [*ends, total] if count else ends


PLAN_ROWS = 100_000  # rows that are Python objects at the same time
LENGTH_JITTER = 0.02  # relative; it swaps similar lengths, so that batches differ between epochs
MAX_JOINED_SECONDS = 10.0  # longer examples are not joined further: attention is quadratic

MIN_WINDOW_BATCHES = 8  # of a mix; with fewer batches in a window, there would be much padding
MIX_SEED = 1  # gives a mix other random numbers than the plan

RowNumbers = Sequence[int] | Counts  # a number for each row, such as its samples


class TrainSampler:
    """Plan the steps of one epoch, each of utterances of similar length.

    With probability ``concat_prob``, an utterance is joined to the one drawn before it, so that
    words have more contexts than the few sentences of a small corpus offer. Each example is played
    at one of the ``speeds``. Utterances of two sources are not joined.

    >>> sampler = TrainSampler(samples=[16_000, 8_000, 16_000], batch_seconds=2, seed=1)
    >>> sampler.set_epoch(1)
    >>> sorted(row for step in sampler.steps() for example in step for row in example.rows)
    [0, 1, 2]

    Args:
        samples: the length of every utterance.
        batch_seconds: the padded audio of a step, over all ranks.
        seed: decides the joins, the speeds and the order.
        concat_prob: the probability of a join.
        speeds: factors; one is drawn for each example.
        shards: the number of the shard of every utterance.
        shuffle_shards: how many shards are shuffled together.
        sources: of a mix; by default, every utterance is used once in each epoch.
        sample_rate: Hz.
    """

    def __init__(
        self,
        *,
        samples: RowNumbers,
        batch_seconds: float,
        seed: int,
        concat_prob: float = 0.0,
        speeds: Sequence[float] = (1.0,),
        shards: RowNumbers | None = None,
        shuffle_shards: int = 8,
        sources: Sequence[MixSource] = (),
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        self._samples = np.asarray(samples)
        shards = np.zeros_like(self._samples) if shards is None else np.asarray(shards)
        numbers, self._shard_of_row = np.unique(shards, return_inverse=True)  # indices from 0
        self._num_shards = len(numbers)
        self._shuffle_shards = shuffle_shards
        self._sources = sources
        self._source_of_row = np.zeros(len(self._samples), np.int16)
        for index, source in enumerate(sources):
            self._source_of_row[source.rows] = index
        self._capacity = seconds_to_samples(batch_seconds, sample_rate)
        self._long_enough = seconds_to_samples(MAX_JOINED_SECONDS, sample_rate)
        self.seed = seed
        self._concat_prob = concat_prob
        self._percents = to_percents(speeds)
        self._epoch = 0
        _check_capacity(self._samples, batch_seconds, sample_rate)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def steps(self) -> Plan:
        """Join rows in random order, at random speeds, and batch them by length.

        Lengths rise in one window and fall in the next, so that batches across the border of two
        windows have similar lengths.
        """
        random = np.random.default_rng((self.seed, self._epoch))
        if self._sources:
            rows, windows = self._draw_mix(random)
        else:
            rows = random.permutation(len(self._samples))
            windows = self._windows(rows, self.seed, self._epoch, self._num_shards)
        by_window = np.lexsort((self._source_of_row[rows], windows))
        rows = rows[by_window]
        windows = windows[by_window]
        count = len(rows)
        is_same_source = np.diff(self._source_of_row[rows], prepend=-1) == 0
        examples = join_rows(
            self._samples,
            order=rows,
            percents=random.choice(self._percents, count),
            is_joined=(random.random(count) < self._concat_prob) & is_same_source,
            capacity=self._capacity,
            target_samples=self._long_enough,
        )
        spread = random.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, len(examples))
        windows = windows[examples.starts[:-1]]
        lengths = examples.samples * spread * np.where(windows % 2, -1, 1)
        order = np.lexsort((lengths, windows)).astype(np.int32)
        return Plan(examples, order, self._capacity).shuffle(random, windows)

    def _windows(self, rows: Counts, *seeds: int) -> Counts:
        """Return the window of every row, which depends on the random order of its shard."""
        shards = np.random.default_rng(seeds).permutation(self._num_shards)
        windows: Counts = (shards // self._shuffle_shards)[self._shard_of_row[rows]]
        return windows

    def _draw_mix(self, random: np.random.Generator) -> tuple[Counts, Counts]:
        """Return the rows of a mixed epoch in random order, and the window of each."""
        sources = self._sources
        num_repeats = max(source.epoch_samples / source.samples for source in sources)
        num_steps = sum(source.epoch_samples for source in sources) // self._capacity
        num_windows = max(
            math.ceil(self._num_shards / self._shuffle_shards),
            min(math.ceil(num_repeats), num_steps // MIN_WINDOW_BATCHES),
        )
        drawn = [self._draw_source(index) for index in range(len(sources))]
        windows = [np.arange(len(rows)) * num_windows // max(1, len(rows)) for rows in drawn]
        shuffled = random.permutation(sum(map(len, drawn)))
        return np.concatenate(drawn)[shuffled], np.concatenate(windows)[shuffled]

    def _draw_source(self, index: int) -> Counts:
        """Return the rows of a source in this epoch: the next part of an endless sequence.

        The sequence repeats all rows in passes, each in a new order by windows of shards.
        """
        source = self._sources[index]
        start = source.epoch_samples * max(0, self._epoch - 1)  # epochs count from 1
        stop = start + source.epoch_samples
        drawn: list[Counts] = []
        for number in range(start // source.samples, (stop - 1) // source.samples + 1):
            seeds = (self.seed, number, index, MIX_SEED)
            rows = np.random.default_rng(seeds).permutation(source.rows)
            rows = rows[np.argsort(self._windows(rows, *seeds), kind="stable")]
            samples = self._samples[rows]
            row_starts = number * source.samples + np.cumsum(samples) - samples
            drawn.append(rows[(start <= row_starts) & (row_starts < stop)])
        return np.concatenate(drawn)


class RankSampler(Sampler[MicroBatch]):
    """Deal the steps of ``sampler``: yield ``accumulation`` micro-batches of this rank per step."""

    def __init__(
        self, sampler: StepSampler, *, rank: int = 0, world_size: int = 1, accumulation: int = 1
    ) -> None:
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._accumulation = accumulation
        self._epoch, self._start = 0, 0
        self._planned: tuple[int, Sequence[MicroBatch]] | None = None
        # Of a sampler with a state: the epoch that is planned, and the state that planned it
        self._plan_epoch, self._plan_state = 0, dict[str, Any]()
        # Called with the steps of an epoch before its first step is dealt
        self.on_epoch: Callable[[Iterator[MicroBatch]], None] = lambda steps: None

    def use(self, sampler: object) -> None:
        """Deal the steps of another sampler; raise ConfigError if it is not valid for this run."""
        if not isinstance(sampler, StepSampler) or sampler.seed != self.sampler.seed:
            raise ConfigError(
                f"`make_sampler` of the recipe must return an object with `seed` (the run's seed, "
                f"{self.sampler.seed}), `set_epoch(epoch)` and `steps()`, but "
                f"{type(sampler).__name__} lacks one of them."
            )
        self.sampler = sampler
        self._planned = None

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its micro-batches to skip."""
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches; ``accumulation`` consecutive ones belong to a step."""
        num_shares = self._world_size * self._accumulation
        plan = self.steps()
        first, skipped = divmod(self._start, self._accumulation)
        self.on_epoch(map(plan.__getitem__, range(first, len(plan))))
        steps = map(plan.__getitem__, range(first, len(plan)))
        dealt = (split_batch(step, num_shares)[self._rank :: self._world_size] for step in steps)
        return islice(chain.from_iterable(dealt), skipped, None)

    def __len__(self) -> int:
        return len(self.steps()) * self._accumulation

    def steps(self) -> Sequence[MicroBatch]:
        if self._planned is None or self._planned[0] != self._epoch:
            steps = self.plan_again()
            if not len(steps) or not step_sizes(steps).all():
                raise ConfigError(
                    "The sampler of the recipe planned an epoch without steps, or an empty step."
                )
            if not isinstance(self.sampler, TrainSampler):
                digests = gather_over_ranks(digest_steps(steps))
                if len({*digests}) > 1:
                    raise ConfigError(
                        f"The sampler of the recipe plans other steps of epoch {self._epoch} on "
                        "other processes. Gather what its plan depends on: "
                        "sbkit.distributed.ranks.gather_over_ranks"
                    )
            self._planned = self._epoch, steps
        return self._planned[1]

    def plan_again(self) -> Sequence[MicroBatch]:
        """Plan the epoch, with the state at its beginning; the state of now stays."""
        sampler = self.sampler
        sampler.set_epoch(self._epoch)
        if not isinstance(sampler, StatefulSampler):
            return sampler.steps()
        state = deepcopy(sampler.state_dict())
        if self._plan_epoch != self._epoch:
            self._plan_epoch, self._plan_state = self._epoch, state
        sampler.load_state_dict(deepcopy(self._plan_state))
        steps = sampler.steps()
        sampler.load_state_dict(state)
        return steps

    def save(self, file: Path) -> None:
        """Save the state of the sampler, now and at the beginning of the planned epoch."""
        assert isinstance(self.sampler, StatefulSampler)
        state = self.sampler.state_dict()
        torch.save({"now": state, "epoch": self._plan_epoch, "then": self._plan_state}, file)

    def load(self, file: Path, end_of_epoch: bool) -> None:
        """Load what `save` has saved; ``end_of_epoch`` makes no difference."""
        assert isinstance(self.sampler, StatefulSampler)
        saved = torch.load(file, weights_only=True)
        self._plan_epoch, self._plan_state = saved["epoch"], saved["then"]
        self.sampler.load_state_dict(saved["now"])
        self._planned = None


def digest_steps(steps: Sequence[MicroBatch]) -> str:
    """Return a hash of the examples of steps."""
    content = repr([[(e.rows, e.samples, e.percent, e.weight) for e in step] for step in steps])
    return hashlib.sha256(content.encode()).hexdigest()


class EvalSampler(Sampler[MicroBatch]):
    """Deal a split to the ranks: every utterance once, the same batches for any world size."""

    def __init__(
        self,
        *,
        samples: RowNumbers,
        batch_seconds: float,
        rank: int = 0,
        world_size: int = 1,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        lengths = np.asarray(samples)
        # A clip longer than the capacity is a batch by itself.
        capacity = seconds_to_samples(batch_seconds, sample_rate)
        order = np.argsort(lengths, kind="stable").astype(np.int32)
        starts = np.arange(len(lengths) + 1, dtype=np.int32)
        percents = np.full(len(lengths), 100, np.int16)
        self.plan = Plan(Examples(starts[:-1], starts, lengths, percents), order, capacity)
        self._indices = range(rank, len(self.plan), world_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.plan.__getitem__, self._indices)

    def __len__(self) -> int:
        return len(self._indices)


@concerning("speeds")
def to_percents(speeds: Sequence[float]) -> list[int]:
    """Convert speeds to percent: small integers make a small resampling kernel."""
    try:
        percents = [round(100 * speed) for speed in speeds]
        is_exact = bool(percents) and [percent / 100 for percent in percents] == list(speeds)
    except (TypeError, ValueError, OverflowError):  # not a list, or not of numbers
        percents = []
        is_exact = False
    if not is_exact or min(percents) <= 0:
        raise ConfigError(
            "`speeds` must be a list of positive numbers with at most two decimal places, such as "
            f"[1.0], but is {speeds!r}."
        )
    return percents


def fastest_percent(speeds: Sequence[float]) -> int:
    """Return the highest of the speeds and the natural speed, in percent."""
    return max(100, *to_percents(speeds))


def split_batch(step: MicroBatch, num_shares: int) -> list[MicroBatch]:
    """Deal examples to shares in turn, the longest first, so that all shares are similar.

    If there are fewer examples than shares, the shortest example fills the rest with weight 0.
    """
    by_length = sorted(step, key=lambda example: (-example.samples, example.rows))
    filler = replace(by_length[-1], weight=0)
    return [by_length[share::num_shares] or [filler] for share in range(num_shares)]


@concerning("batch_seconds")
def _check_capacity(samples: RowNumbers, batch_seconds: float, sample_rate: int) -> None:
    longest = int(np.argmax(samples))
    seconds = samples_to_seconds(int(samples[longest]), sample_rate)
    if seconds > batch_seconds:
        raise ConfigError(
            f"`batch_seconds` is {batch_seconds:g}, but the longest utterance (row {longest}) has "
            f"{seconds:.1f} s. Raise `batch_seconds`, or lower `max_seconds`."
        )
