"""A profile tells what the steps of a run spend their time on."""

import gzip
import json
from pathlib import Path

import pytest

from sbkit.train.metrics import PROFILED_BATCHES, WARM_UP_BATCHES
from tests.train.test_speechbrain_ways import batches, brain_of


@pytest.mark.parametrize("count", [3, WARM_UP_BATCHES + 4, WARM_UP_BATCHES + PROFILED_BATCHES + 5])
def test_a_run_writes_the_profile_of_its_first_epoch(
    count: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    brain = brain_of(hparams={"output_folder": str(tmp_path), "profile": True})
    brain.fit([1, 2], batches(count))
    assert brain.optimizer_step == 2 * count
    assert capfd.readouterr().err == ""  # as of the GPU that a CPU has not
    watched = min(PROFILED_BATCHES, max(0, count - WARM_UP_BATCHES))
    assert (tmp_path / "profile.txt").exists() == (watched > 0)
    if not watched:
        assert caplog.text.count("profile: True needs an epoch of more than 10 steps") == 1
        return
    assert caplog.text.count("profile of") == 1
    verdict = (tmp_path / "profile.txt").read_text()
    assert verdict.startswith(f"profile of {watched} steps: ")
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::linear") == watched
