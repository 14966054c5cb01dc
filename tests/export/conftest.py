"""The clips of a run's test set."""

from pathlib import Path

import pytest

from sbkit.audio.io import Samples
from sbkit.runtime.score_sets import prepare_test_sets, read_whole_clips


@pytest.fixture(scope="module")
def clips(folder: Path) -> list[Samples]:
    """Load every clip of the test set of the run beside a bundle, the shortest first."""
    (rows,) = prepare_test_sets(folder.parent / "run").test.values()
    return [row["audio"] for batch in read_whole_clips(rows, 16_000) for row in batch.values()]
