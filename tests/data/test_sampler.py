"""Plans of batches: every row once, on any hardware; in a mix by the shares of its sources."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.mix import Shares, make_sources, parse_mix_shares
from sbkit.data.sampler import (
    MAX_JOINED_SECONDS,
    EvalSampler,
    Example,
    MicroBatch,
    RankSampler,
    TrainSampler,
    fastest_percent,
    split_batch,
    to_percents,
)

SECOND = 16_000


def lengths(seed: int) -> list[int]:
    """Draw the lengths of 1 to 300 clips, of 0 to 30 s, some of them equal."""
    random = np.random.default_rng(seed)
    count = int(random.choice([1, 2, 3, 5, 40, 300]))
    longest = int(random.choice([1, SECOND, 30 * SECOND]))
    return [int(length) for length in random.integers(0, longest + 1, count)]


def micro_batches(
    samples: list[int], *, world_size: int = 1, epoch: int = 1, **options: Any
) -> list[list[MicroBatch]]:
    accumulation = options.pop("accumulation", 1)
    plan = TrainSampler(samples=samples, **{"batch_seconds": 40.0, "seed": 7, **options})
    ranks = []
    for rank in range(world_size):
        sampler = RankSampler(plan, rank=rank, world_size=world_size, accumulation=accumulation)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    return ranks


def steps(ranks: list[list[MicroBatch]], accumulation: int) -> list[set[Example]]:
    """Collect the examples of each optimizer step over all ranks, without fillers."""
    count = len(ranks[0]) // accumulation
    return [
        {
            example
            for rank in ranks
            for batch in rank[step * accumulation : (step + 1) * accumulation]
            for example in batch
            if example.weight
        }
        for step in range(count)
    ]


def padded(batch: MicroBatch) -> int:
    """Count the samples of a batch, including padding."""
    return len(batch) * max(example.samples for example in batch)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_train_sampler_yields_each_row_once_and_the_same_steps_on_any_hardware(
    seed: int, world_size: int, accumulation: int
) -> None:
    samples = lengths(seed)
    options: dict[str, Any] = {"concat_prob": seed % 3 / 2, "speeds": [0.5, 1.0, 2.0]}
    ranks = micro_batches(samples, world_size=world_size, accumulation=accumulation, **options)
    real = (example for rank in ranks for batch in rank for example in batch if example.weight)
    rows = Counter(row for example in real for row in example.rows)
    assert rows == Counter(range(len(samples)))
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) % accumulation == 0
    assert all(batch for rank in ranks for batch in rank)
    (batches,) = micro_batches(samples, **options)
    assert steps(ranks, accumulation) == steps([batches], 1)
    assert max(map(padded, batches)) <= 40 * SECOND


@pytest.mark.parametrize("concat_prob", [0.0, 0.5])
def test_train_sampler_pads_little_in_a_small_corpus(concat_prob: float) -> None:
    """The 419 lengths of the default corpus, by their quantiles: 18 minutes."""
    shares, seconds = [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1], [0.6, 0.7, 0.9, 1.4, 2.8, 7.3, 31.1]
    drawn = np.interp(np.linspace(0, 1, 419) ** 1.05, shares, seconds)
    sampler = TrainSampler(
        samples=(drawn * SECOND).astype(int),
        batch_seconds=32.0,
        seed=7,
        concat_prob=concat_prob,
        speeds=[0.9, 1.0, 1.1],
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler.steps())
        total = sum(example.samples for batch in batches for example in batch)
        assert total / sum(map(padded, batches)) >= 0.96


def test_train_sampler_fills_ranks_without_rows_at_weight_0() -> None:
    ranks = micro_batches([3 * SECOND, SECOND], world_size=3, accumulation=1)
    long, short = Example((0,), 3 * SECOND), Example((1,), SECOND)
    assert ranks == [[[long]], [[short]], [[replace(short, weight=0)]]]
    filler = replace(long, weight=0)
    assert split_batch([long], 3) == [[long], [filler], [filler]]


def test_train_sampler_plan_depends_on_seed_and_epoch() -> None:
    samples = lengths(5) * 3
    first = micro_batches(samples, epoch=1)
    assert first == micro_batches(samples, epoch=1)
    assert first != micro_batches(samples, epoch=2)
    assert first != micro_batches(samples, epoch=1, seed=8)
    contents = [set(map(frozenset, micro_batches(samples, epoch=epoch)[0])) for epoch in (1, 2)]
    assert contents[0] != contents[1]  # other neighbors, not just another order


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(7))
def test_eval_sampler_deals_batches_without_duplicates(seed: int, world_size: int) -> None:
    """A longer utterance is a batch of its own; a split may be empty."""
    samples = lengths(seed) if seed < 6 else []
    single = list(EvalSampler(samples=samples, batch_seconds=20.0))
    shares = [
        EvalSampler(samples=samples, batch_seconds=20.0, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert [len(share) for share in shares] == [len(list(share)) for share in shares]
    dealt = [batch for share in shares for batch in share]
    assert Counter(map(tuple, dealt)) == Counter(map(tuple, single))
    rows = sorted(example.rows for batch in dealt for example in batch)
    assert rows == [(row,) for row in range(len(samples))]
    assert all((e.percent, e.weight) == (100, 1) for batch in single for e in batch)
    assert all(len(batch) == 1 or padded(batch) <= 20 * SECOND for batch in single)


def test_train_sampler_joins_utterances_up_to_a_length() -> None:
    samples = [SECOND] * 999
    (batches,) = micro_batches(samples, concat_prob=0.5)
    counts = Counter(len(example.rows) for batch in batches for example in batch)
    assert counts[1] == pytest.approx(250, abs=50)  # neither joined nor followed
    assert counts[2] == pytest.approx(125, abs=40)
    assert max(counts) <= 10
    assert all(e.samples == len(e.rows) * SECOND for batch in batches for e in batch)
    (joined,) = micro_batches(samples, concat_prob=1.0)
    lengths_of_joined = {example.samples for batch in joined for example in batch}
    assert lengths_of_joined == {MAX_JOINED_SECONDS * SECOND, 9 * SECOND}
    (full,) = micro_batches(samples, concat_prob=1.0, batch_seconds=9)
    assert {example.samples for batch in full for example in batch} == {9 * SECOND}
    (apart,) = micro_batches(samples, concat_prob=0.0)
    assert {len(example.rows) for batch in apart for example in batch} == {1}


def test_train_sampler_draws_a_speed_for_each_example() -> None:
    (batches,) = micro_batches([SECOND] * 300, concat_prob=0.3, speeds=[0.9, 1.1])
    counts = Counter(example.percent for batch in batches for example in batch)
    assert set(counts) == {90, 110}
    assert counts[90] == pytest.approx(counts[110], rel=0.4)
    assert any(len({example.percent for example in batch}) == 2 for batch in batches)
    for batch in batches:
        for example in batch:
            assert example.samples == len(example.rows) * (SECOND * 100 // example.percent)


def test_train_sampler_plays_at_natural_speed_what_would_not_fit() -> None:
    (batches,) = micro_batches([36 * SECOND + 1, 36 * SECOND], speeds=[0.9])
    speeds = {example.rows: example.percent for batch in batches for example in batch}
    assert speeds == {(0,): 100, (1,): 90}
    assert (fastest_percent([0.9]), fastest_percent([0.9, 1.1])) == (100, 110)


@pytest.mark.parametrize("speeds", ([], [1.0, -0.9], [1.005], ["fast"], 1.0), ids=str)
def test_to_percents_refuses_bad_speeds(speeds: Any) -> None:
    with pytest.raises(SbkitError, match="`speeds` must be"):
        to_percents(speeds)


# ---- mixes: the shares, walks through large sources, and shares that are refused

NUM_REAL = 200  # rows of 1 to 6 s, 700 s in all
HALF: Shares = {"real": None, "synthetic": 0.5}


class Mixed(RankSampler):
    """A plan for the source ``real``, and others with some number of rows."""

    def __init__(
        self,
        epoch: int,
        shares: Shares,
        *others: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        counts = (NUM_REAL, *others)
        self.lengths = np.random.default_rng(0).integers(16_000, 96_000, sum(counts))
        self.source_of_row = np.repeat(np.arange(len(counts)), counts)
        sources = make_sources(self.lengths, self.source_of_row, shares)
        options = {"sources": sources, "batch_seconds": 32.0, "seed": 7, **options}
        plan = TrainSampler(samples=self.lengths, **options)
        super().__init__(plan, rank=rank, world_size=world_size)
        self.set_epoch(epoch, start)

    def rows(self, batches: slice = slice(None)) -> list[int]:
        return [row for batch in [*self][batches] for ex in batch for row in ex.rows]

    def samples_by_source(self, batches: slice = slice(None)) -> Any:
        rows = self.rows(batches)
        return np.bincount(self.source_of_row[rows], self.lengths[rows])


@pytest.mark.parametrize(
    ("shares", "others", "expected"),
    [
        (HALF, [2000], [0.5, 0.5]),
        ({"real": None, "synthetic": 0.25}, [20], [0.75, 0.25]),
        ({"real": None, "other": None, "synthetic": 0.5}, [200, 2000], [0.25, 0.25, 0.5]),
        ({"real": 0.4, "synthetic": 0.6}, [200], [0.4, 0.6]),
    ],
)
def test_epoch_has_each_source_by_its_share(
    shares: Shares, others: list[int], expected: list[float]
) -> None:
    """Unnamed sources are used once; if all are named, an epoch is as long as without a mix."""
    for epoch in (1, 2, 9):
        mixed = Mixed(epoch, shares, *others)
        samples = mixed.samples_by_source()
        if None in shares.values():
            assert samples[0] == mixed.lengths[:NUM_REAL].sum()
        else:
            assert samples.sum() == pytest.approx(mixed.lengths.sum(), rel=0.02)
        assert samples / samples.sum() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("concat_prob", [0.0, 0.5])
@pytest.mark.parametrize("num_synthetic", [50, 2000])
def test_mixed_steps_are_the_same_on_any_hardware_and_after_a_stop(
    num_synthetic: int, concat_prob: float
) -> None:
    options: dict[str, Any] = {"concat_prob": concat_prob, "speeds": [0.9, 1.0, 1.1]}
    mixed = Mixed(3, HALF, num_synthetic, **options)
    plan = [*mixed]
    for size in (2, 3):
        ranks = [
            [*Mixed(3, HALF, num_synthetic, rank=rank, world_size=size, **options)]
            for rank in range(size)
        ]
        assert steps(ranks, 1) == steps([plan], 1)
    assert [*Mixed(3, HALF, num_synthetic, start=9, **options)] == plan[9:]
    examples = [example for batch in plan for example in batch]
    assert all(len({*mixed.source_of_row[[*example.rows]]}) == 1 for example in examples)
    is_joined = [len(example.rows) > 1 for example in examples]
    assert np.mean(is_joined) == pytest.approx(0.8 * concat_prob, abs=0.15)
    # A row that repeats four times an epoch is rarely twice in a batch.
    rows_of_batches = [[row for example in batch for row in example.rows] for batch in plan]
    num_distinct = sum(len({*rows}) for rows in rows_of_batches)
    assert num_distinct > 0.95 * sum(map(len, rows_of_batches))


def test_large_source_is_used_up_before_a_row_comes_again() -> None:
    counts = np.zeros(NUM_REAL + 1000, dtype=int)
    epochs = [Mixed(epoch, HALF, 1000).rows() for epoch in range(1, 16)]
    for rows in epochs:
        counts += np.bincount(rows, minlength=len(counts))
        synthetic = counts[NUM_REAL:]
        assert synthetic.max() - synthetic.min() <= 1
    assert synthetic.min() >= 2
    first, *others = [{row for row in rows if row >= NUM_REAL} for rows in epochs]
    assert all(len(first & rows) < len(first) / 2 for rows in others)  # each pass has its own order


def test_windows_of_shards_have_parts_of_every_source() -> None:
    """The real rows are in one shard, the synthetic ones in a hundred."""
    shards = np.append(np.zeros(NUM_REAL, dtype=int), 1 + np.arange(2000) // 20)
    mixed = Mixed(2, HALF, 2000, shards=shards)
    for start in range(0, len(mixed) - 10, 10):
        real, synthetic = mixed.samples_by_source(slice(start, start + 10))
        assert synthetic / (real + synthetic) == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize(
    ("mix", "sentence"),
    [
        ({"b": 0.5}, r"`mix` names 'b', .* train, train-b"),
        ({"train-b": 1.0}, r"sum to less than 1, because an epoch also has train, but sum to 1\."),
        ({"train": 0.5, "train-b": 0.4}, r"must sum to 1, but sum to 0\.9\."),
    ],
)
def test_impossible_mix_is_refused(mix: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SbkitError, match=sentence):
        parse_mix_shares(mix, ["train", "train-b"])
