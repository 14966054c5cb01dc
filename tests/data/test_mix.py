"""Plans of a mixed epoch: the shares, walks through large sources, and shares that are refused."""

from typing import Any

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.mix import Shares, make_sources, read_shares
from sbkit.data.sampler import TrainSampler
from tests.data.test_sampler import steps

NUM_REAL = 200  # rows of 1 to 6 s, 700 s in all
HALF: Shares = {"real": None, "synthetic": 0.5}


class Mixed(TrainSampler):
    """A plan for the source ``real``, and others with some number of rows."""

    def __init__(self, epoch: int, shares: Shares, *others: int, start: int = 0, **options: Any):
        counts = (NUM_REAL, *others)
        self.lengths = np.random.default_rng(0).integers(16_000, 96_000, sum(counts))
        self.source_of_row = np.repeat(np.arange(len(counts)), counts)
        sources = make_sources(self.lengths, self.source_of_row, shares)
        super().__init__(
            samples=self.lengths, sources=sources, batch_seconds=32.0, seed=7, **options
        )
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
            [*Mixed(3, HALF, num_synthetic, world_size=size, rank=rank, **options)]
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
        ({"b": 0.5}, r"`mix` names 'b', which is not .* Choose among: train, train-b\."),
        ({"train-b": 0}, r"above 0 and at most 1, but that of train-b is 0\. To train with"),
        ({"train-b": True}, "that of train-b is True"),
        ({"train-b": "half"}, "that of train-b is 'half'"),
        ({"train-b": 1.0}, r"sum to less than 1, because an epoch also has train, but sum to 1\."),
        ({"train": 0.5, "train-b": 0.4}, r"must sum to 1, but sum to 0\.9\."),
    ],
)
def test_impossible_mix_is_refused(mix: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SbkitError, match=sentence):
        read_shares(mix, ["train", "train-b"])
