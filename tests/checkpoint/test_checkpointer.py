"""A checkpoint is whole or absent, whatever happens while it is written or afterwards."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import nn

from sbkit.base.checksums import find_damage
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import UNFINISHED
from tests import processes
from tests.checkpoint.saves import checkpointer, line, recovered, save
from tests.shortage import largest_file

KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from torch import nn
from sbkit.checkpoint.checkpointer import Checkpointer

def die(part, path):
    Path(path).write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)

model = nn.Linear(3, 2)
Checkpointer(sys.argv[1], recoverables={"model": model}).save_checkpoint(meta={"epoch": 1})
parts = {"model": model, "last": object()}
deadly = Checkpointer(sys.argv[1], recoverables=parts, custom_save_hooks={"last": die})
deadly.save_checkpoint(meta={"epoch": 2})
"""


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert recovered(tmp_path) is None
    save(tmp_path, 0.5, 0.2, 0.4)
    assert recovered(tmp_path) == pytest.approx(0.4)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.2)
    assert recovered(tmp_path, max_key="CER") == pytest.approx(0.5)


def test_a_score_that_is_not_finite_ranks_last(tmp_path: Path) -> None:
    save(tmp_path, 0.2, float("nan"), 0.4)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.2)
    assert recovered(tmp_path, max_key="CER") == pytest.approx(0.4)


def test_what_cannot_be_saved_is_no_recoverable(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="Recoverables must be modules .* but `lr` is a float"):
        Checkpointer(tmp_path, recoverables={"model": nn.Linear(2, 2), "lr": 0.1})


def test_a_checkpoint_with_a_name_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpointer(tmp_path, line(value)).save_checkpoint(name="last")
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+last"]
    assert recovered(tmp_path) == 2.0


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    for value in (0.5, 0.2, 0.4, 0.1, 0.3):
        keeper = checkpointer(tmp_path, line(value))
        keeper.save_and_keep_only(meta={"CER": value}, min_keys=["CER"], num_to_keep=1)
    assert sorted(each.meta["CER"] for each in keeper.list_checkpoints()) == [0.1, 0.3]
    assert recovered(tmp_path) == pytest.approx(0.3)


def test_a_clock_that_goes_back_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for value, hours in ((0.1, 0), (0.5, -1), (0.4, -1), (0.3, -24), (0.6, -2)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + 3600 * hours)
        keeper = checkpointer(tmp_path, line(value))
        keeper.save_and_keep_only(meta={"CER": value}, min_keys=["CER"], num_to_keep=1)
        assert recovered(tmp_path) == pytest.approx(value)
    assert sorted(each.meta["CER"] for each in keeper.list_checkpoints()) == [0.1, 0.6]


def test_a_kill_while_saving_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    done = processes.run(["-c", KILLED_WHILE_SAVING, tmp_path / "saves"])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((tmp_path / "saves").iterdir())) == 2  # one of them unfinished
    model = nn.Linear(3, 2)
    found = checkpointer(tmp_path / "saves", model).recover_if_possible()
    assert found is not None
    assert found.meta["epoch"] == 1
    checkpointer(tmp_path / "saves", model).check_same_model()  # as a run does that goes on
    assert list((tmp_path / "saves").iterdir()) == [found.path]


def test_who_reads_leaves_what_another_is_writing(tmp_path: Path) -> None:
    save(tmp_path, 0.5)
    being_written = tmp_path / f"{UNFINISHED}CKPT+2026-11-20+12-00-00+00"
    being_written.mkdir()
    assert recovered(tmp_path) == 0.5
    assert len(Checkpointer(tmp_path).find_whole(2, min_key="CER")) == 1
    checkpointer(tmp_path, line(0.0)).load_average(2)
    assert being_written.exists()


@pytest.mark.parametrize("size", [20, 5000])  # not even the meta file, not all of the weights
def test_a_full_disk_leaves_the_one_before_and_nothing_else(tmp_path: Path, size: int) -> None:
    big = nn.Linear(100, 100)
    before = checkpointer(tmp_path, big).save_checkpoint()
    assert before is not None
    with largest_file(size), pytest.raises(SbkitError, match="Make room") as caught:
        checkpointer(tmp_path, big).save_checkpoint()
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [before.path]
    assert find_damage(before.path) is None


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for, rename = set[str](), Path.rename

    def wait(descriptor: int) -> None:
        waited_for.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def renamed(path: Path, target: Path) -> Path:
        assert {path.name, *(each.name for each in path.iterdir())} <= waited_for
        waited_for.add("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 1.0)
    assert "renamed" in waited_for
