"""Every malformed field of a checkpoint is a sentence, and never nonsense that is trained on."""

import re
from pathlib import Path

import pytest
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.integrity import write_checksums
from sbkit.checkpoint.staging import reason_of
from tests.checkpoint.saves import checkpointer, line, recovered, save
from tests.shortage import largest_file


@pytest.mark.parametrize("text", ["-5", "999999999", "many", "", "1.5"])
def test_nonsense_for_an_epoch_is_a_sentence(tmp_path: Path, text: str) -> None:
    parts = {"epochs": EpochCounter(3)}
    saved = Checkpointer(tmp_path, recoverables=parts).save_checkpoint()
    assert saved is not None
    (saved.path / "epochs.ckpt").write_text(text)
    write_checksums(saved.path)
    with pytest.raises(SbkitError, match="epochs.ckpt must hold what training saved"):
        Checkpointer(tmp_path, recoverables=parts).recover_if_possible()


@pytest.mark.parametrize("value", ["a text", "[1]", "true", "null", "{}"])
def test_a_score_that_is_no_number_ranks_nowhere(tmp_path: Path, value: str) -> None:
    first, second = save(tmp_path, 0.2, 0.4)
    meta = first / "CKPT.yaml"
    meta.write_text(re.sub("CER: .*", f"CER: {value}", meta.read_text()))
    write_checksums(first)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.4)
    meta = second / "CKPT.yaml"
    meta.write_text(re.sub("end-of-epoch: .*", "end-of-epoch: 7", meta.read_text()))
    write_checksums(second)
    assert recovered(tmp_path) == pytest.approx(0.2)


def test_a_score_that_is_a_list_stands_in_no_way_of_later_ones(tmp_path: Path) -> None:
    first, _ = save(tmp_path, 0.2, 0.4)
    meta = first / "CKPT.yaml"
    meta.write_text(re.sub("CER: .*", "CER: [1]", meta.read_text()))
    write_checksums(first)
    later = checkpointer(tmp_path, line(0.3))
    later.save_and_keep_only(meta={"CER": 0.3}, num_to_keep=1, min_keys=["CER"])
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.3)


@pytest.mark.timeout(20)
def test_a_meta_file_without_end_is_none(tmp_path: Path) -> None:
    first, _ = save(tmp_path, 0.2, 0.4)
    doubled = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
    meta = first / "CKPT.yaml"
    meta.write_text(f"a0: &a0 [x]\n{doubled}\n{meta.read_text()}")
    write_checksums(first)
    later = checkpointer(tmp_path, line(0.3))
    later.save_and_keep_only(meta={"CER": 0.3}, num_to_keep=3, min_keys=["CER"])
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.3)


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
