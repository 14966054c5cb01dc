"""Every batch has a shape of the table, and padding to it changes no answer."""

from pathlib import Path

import numpy as np
import pytest

from sbkit.runtime.model import Shapes, round_up
from sbkit.runtime.runtimes import open_model
from tests.runtime.bundles import make_bundle

RATE = 16_000


@pytest.mark.parametrize("fewest", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_batches_have_the_shapes_of_the_table(seed: int, fewest: int) -> None:
    table, random = Shapes.table(RATE, batch_seconds=10.0), np.random.default_rng(seed)
    lengths = random.integers(1, 30 * RATE, random.integers(1, 60)).tolist()
    batches = list(table.batches(lengths, min_batches=fewest))
    assert sorted(place for batch in batches for place in batch) == [*range(len(lengths))]
    assert len(batches) >= min(fewest, len(lengths))
    pairs = table.pairs()
    for batch in batches:
        padded = {round_up(lengths[place], table.lengths) for place in batch}
        assert len(padded) == 1
        assert (len(batch), *padded) in pairs


def test_padding_to_the_table_changes_no_answer(tmp_path: Path) -> None:
    thread = open_model(make_bundle(tmp_path), device="cpu").model
    random = np.random.default_rng(0)
    clips = [random.integers(-9000, 9000, samples).astype(np.int16) for samples in (8000, 9000)]
    before = thread.encode(clips)
    thread.warm_up(Shapes.table(RATE, batch_seconds=2.0, clips=(1, 2), seconds=(0.5, 1.0)))
    for one, other in zip(before, thread.encode(clips), strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert thread.call(lambda model: model.padded_lengths) == (8000, 16_000)
    thread.close()
