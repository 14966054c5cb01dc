"""A batch that is not finite is skipped and named."""

from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import BAD_INPUT
from sbkit.logs.run_log import read_log
from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.runs import Workplace, last_parameters, read_json

pytestmark = pytest.mark.slow

NO_CHECK = "--check=false"


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A release in which one training clip is noise at full scale."""
    return noisy_workplace(asterisk_english, tmp_path_factory.mktemp("nonfinite"))


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A YAML whose front-end cannot stand such noise."""
    return write_fragile(tmp_path_factory.mktemp("yaml"))


@pytest.fixture(scope="module")
def finished(workplace: Workplace, fragile: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished")
    assert workplace.train_here(run, "--number_of_epochs=2", NO_CHECK, yaml=fragile) == 0
    return run


def test_nonfinite_step_is_skipped_and_counted(finished: Path) -> None:
    records = read_log(finished / "train_log.jsonl")
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["skipped"] for record in epochs] == [1, 1]
    steps = [record for record in records if record["kind"] == "step"]
    assert sum(record["skipped"] for record in steps) == 2
    assert all(
        np.isfinite(record["loss"]) for record in (*epochs, *(s for s in steps if not s["skipped"]))
    )
    assert all(value.isfinite().all() for value in last_parameters(finished).values())


def test_nonfinite_batch_is_recorded_with_its_utterances(
    finished: Path, workplace: Workplace
) -> None:
    files = sorted((finished / "nonfinite").glob("*.json"))
    assert len(files) == 2
    for file in files:
        record = read_json(file)
        (batch,) = record["micro_batches"]
        assert (record["fault"], batch["loss_is_finite"]) == ("loss", False)
        heard = [name for each in batch["ids"] for name in each.split("+")]
        assert noisy_clip(workplace).stem in heard
        assert len(batch["ids"]) == len(batch["samples"])


def test_too_many_nonfinite_steps_stop_the_run(
    workplace: Workplace,
    fragile: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--nonfinite_patience=0", NO_CHECK)
    code = workplace.train_here(tmp_path, *options, yaml=fragile)
    assert code == BAD_INPUT
    told = capsys.readouterr()
    assert "its loss is not finite; its utterances are in" in told.err
    assert "`nonfinite_patience`" in told.err
