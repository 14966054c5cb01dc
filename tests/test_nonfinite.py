"""A batch whose loss is not finite is skipped and named."""

from pathlib import Path

import numpy as np
import pytest

from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.runs import Workplace, last_parameters, read_json, records_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a release with one training clip of noise at full scale."""
    return noisy_workplace(asterisk_english, tmp_path_factory.mktemp("nonfinite"))


@pytest.fixture(scope="module")
def finished(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with a front-end that overflows with such noise."""
    run, fragile = tmp_path_factory.mktemp("run"), write_fragile(tmp_path_factory.mktemp("yaml"))
    assert workplace.train_here(run, "--number_of_epochs=2", "--check=false", yaml=fragile) == 0
    return run


def test_nonfinite_step_is_skipped_and_counted(finished: Path) -> None:
    epochs, steps = records_of(finished, "epoch"), records_of(finished, "step")
    assert [epoch["skipped_steps"] for epoch in epochs] == [1, 1]
    assert sum(step["skipped_steps"] for step in steps) == 2
    finite = [step for step in steps if not step["skipped_steps"]]
    assert all(np.isfinite(record["loss"]) for record in (*epochs, *finite))
    assert all(value.isfinite().all() for value in last_parameters(finished).values())


def test_nonfinite_batch_is_recorded_with_its_utterances(
    finished: Path, workplace: Workplace
) -> None:
    files = sorted((finished / "nonfinite").glob("*.json"))
    assert len(files) == 2
    log = (finished / "train.log").read_text()
    for file in files:
        assert f"its loss is not finite; its utterances are in {file}" in log
        record = read_json(file)
        (batch,) = record["micro_batches"]
        assert (record["fault"], batch["loss_is_finite"]) == ("loss", False)
        assert noisy_clip(workplace).stem in "+".join(batch["ids"])
        assert len(batch["ids"]) == len(batch["samples"])
