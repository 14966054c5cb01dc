"""Plans of batches: every row once, on any hardware."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.sampler import (
    MAX_JOINED_SECONDS,
    EvalSampler,
    Example,
    MicroBatch,
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
    samples: list[int],
    *,
    world_size: int = 1,
    accumulation: int = 1,
    epoch: int = 1,
    seed: int = 7,
    **augmentation: Any,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of an epoch for every rank."""
    ranks = []
    for rank in range(world_size):
        sampler = TrainSampler(
            samples=samples,
            batch_seconds=40.0,
            seed=seed,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            **augmentation,
        )
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


HARDWARE = [(ranks, accumulation) for ranks in (1, 2, 3) for accumulation in (1, 2, 4)]


@pytest.mark.parametrize(("world_size", "accumulation"), HARDWARE)
@pytest.mark.parametrize("seed", range(12))
def test_train_sampler_yields_each_row_once_and_the_same_steps_on_any_hardware(
    seed: int, world_size: int, accumulation: int
) -> None:
    samples = lengths(seed)
    options: dict[str, Any] = {"concat_prob": seed % 3 / 2, "speeds": [0.9, 1.0, 1.1]}
    ranks = micro_batches(samples, world_size=world_size, accumulation=accumulation, **options)
    real = (example for rank in ranks for batch in rank for example in batch if example.weight)
    rows = Counter(row for example in real for row in example.rows)
    assert rows == Counter(range(len(samples)))
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) % accumulation == 0
    assert all(batch for rank in ranks for batch in rank)
    assert steps(ranks, accumulation) == steps(micro_batches(samples, **options), 1)


@pytest.mark.parametrize("seed", range(12))
def test_train_sampler_batches_stay_within_batch_seconds(seed: int) -> None:
    samples = lengths(seed)
    for speeds in ([1.0], [0.5, 2.0]):
        (batches,) = micro_batches(samples, concat_prob=0.5, speeds=speeds)
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
        batches = list(sampler)
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


def test_train_sampler_start_skips_seen_batches() -> None:
    sampler = TrainSampler(samples=lengths(5) * 9, batch_seconds=40.0, seed=7, accumulation=2)
    sampler.set_epoch(3)
    batches, count = list(sampler), len(sampler)
    sampler.set_epoch(3, start=4)
    assert list(sampler) == batches[4:]
    assert len(sampler) == count
    sampler.set_epoch(3, start=count)
    assert list(sampler) == []


def test_train_sampler_refuses_batch_seconds_below_the_longest_utterance() -> None:
    samples = [SECOND, 31 * SECOND, 2 * SECOND]
    with pytest.raises(SbkitError, match=r"is 30, but the longest utterance \(row 1\) has 31\.0 s"):
        TrainSampler(samples=samples, batch_seconds=30.0, seed=0)
    TrainSampler(samples=samples, batch_seconds=31.0, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(6))
def test_eval_sampler_deals_batches_without_duplicates(seed: int, world_size: int) -> None:
    samples = lengths(seed)
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
    assert max(map(padded, single)) <= max(20 * SECOND, *samples)


def test_eval_sampler_accepts_an_utterance_longer_than_its_batches() -> None:
    sampler = EvalSampler(samples=[99 * SECOND, *[11 * SECOND] * 3], batch_seconds=20.0)
    assert list(map(padded, sampler)) == [11 * SECOND] * 3 + [99 * SECOND]  # no larger batches
    assert list(EvalSampler(samples=[], batch_seconds=20.0)) == []


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
    (batches,) = micro_batches([39 * SECOND, SECOND], speeds=[0.9])
    speeds = {example.rows: example.percent for batch in batches for example in batch}
    assert speeds == {(0,): 100, (1,): 90}
    assert (fastest_percent([0.9]), fastest_percent([0.9, 1.1])) == (100, 110)


@pytest.mark.parametrize("speeds", ([], [1.0, -0.9], [1.005], ["fast"], 1.0), ids=str)
def test_to_percents_refuses_bad_speeds(speeds: Any) -> None:
    with pytest.raises(SbkitError, match="`speeds` must be"):
        to_percents(speeds)
