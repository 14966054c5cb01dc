"""Every malformed field of a checkpoint is a sentence, and never nonsense that is trained on."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.staging import reason_of
from tests.checkpoint.saves import checkpointer, line, recovered, save
from tests.shortage import largest_file


def test_a_score_that_is_not_finite_ranks_last(tmp_path: Path) -> None:
    save(tmp_path, 0.2, float("nan"), 0.4)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.2)
    assert recovered(tmp_path, max_key="CER") == pytest.approx(0.4)


def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with largest_file(300), pytest.raises(SbkitError) as caught:
        checkpointer(tmp_path, line(1.0, rows=99)).save_checkpoint()
    assert "unexpected pos" not in str(caught.value)
    assert "space" in str(caught.value) or "too large" in str(caught.value)


def test_another_failure_is_not_called_a_full_disk() -> None:
    said = reason_of(RuntimeError("CUDA error: device-side assert triggered\nCompile with ..."))
    assert said == "CUDA error: device-side assert triggered"
    assert "space" in reason_of(RuntimeError("[enforce fail at inline_container.cc:672] . pos 64"))
