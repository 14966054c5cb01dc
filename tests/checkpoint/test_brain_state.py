"""Every malformed field of a checkpoint is a sentence, and never nonsense that is trained on."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sbkit.train.saved_counters import check_brain_state
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.integrity import write_checksums
from sbkit.checkpoint.rng import random_state
from sbkit.checkpoint.staging import reason_of
from tests.checkpoint.saves import checkpointer, line, recovered, save
from tests.shortage import largest_file


def state() -> dict[str, Any]:
    """Return what a Brain saves, as JSON gives it back."""
    counters = {"step": 3, "optimizer_step": 12, "nonfinite_count": 0}
    sums = {"so_far": {"loss": -0.5}, "unread": {}, "train_seconds": 1.5, "audio_seconds": 9}
    random = random_state(torch.device("cpu"))
    plain: dict[str, Any] = json.loads(json.dumps({**counters, **sums, "random": random}))
    return plain


def test_what_training_leaves_is_taken() -> None:
    check_brain_state(state())
    check_brain_state({"step": 4})  # as SpeechBrain leaves it


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: good.update(step=-5),
        lambda good: good.update(step="text"),
        lambda good: good.update(step=True),
        lambda good: good.update(optimizer_step=10**9),
        lambda good: good.update(optimizer_step=1.5),
        lambda good: good.update(nonfinite_count=None),
        lambda good: good.update(accumulation=0),
        lambda good: good.update(accumulation="2"),
        lambda good: good.update(so_far=3),
        lambda good: good["so_far"].update(loss="much"),
        lambda good: good.update(train_seconds=[]),
        lambda good: good["random"].pop("cpu"),
        lambda good: good["random"].update(cpu="00"),
        lambda good: good["random"].update(cpu="no hexadecimal"),
        lambda good: good["random"].update(python=[3, [1, 2], None]),
        lambda good: good["random"]["python"][1].__setitem__(0, -1),
        lambda good: good["random"]["python"][1].__setitem__(-1, 625),
        lambda good: good["random"]["python"].__setitem__(2, "text"),
        lambda good: good["random"]["numpy"]["state"].update(key=[1]),
        lambda good: good["random"]["numpy"]["state"].update(pos=-9),
        lambda good: good["random"]["numpy"]["state"].update(pos=625),
        lambda good: good["random"]["numpy"].update(gauss="text"),
        lambda good: good["random"].update(numpy=None),
        lambda good: good.update(random=[1]),
    ],
)
def test_what_no_training_leaves_is_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    bad = state()
    before = torch.get_rng_state()
    spoil(bad)
    with pytest.raises((ValueError, LookupError, TypeError, RuntimeError, AttributeError)):
        check_brain_state(bad)
    assert torch.equal(torch.get_rng_state(), before)


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
