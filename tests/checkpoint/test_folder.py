"""Damaged checkpoints are skipped, SpeechBrain's are read, and one run locks a folder."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer

from sbkit.base.checksums import CHECKSUMS, find_damage
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import open_lock, try_lock
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import locked_folder
from sbkit.checkpoint.ranking import SavedCheckpoints
from tests.attacks.hostile import flip
from tests.checkpoint.saves import checkpointer, cut, line, recovered, save, training

DAMAGES = {
    "cut weights": lambda path: cut(path / "model.ckpt"),
    "a flipped bit": lambda path: flip(path / "model.ckpt"),
    "no weights": lambda path: (path / "model.ckpt").unlink(),
    "cut meta": lambda path: cut(path / "CKPT.yaml"),
    "cut checksums": lambda path: cut(path / CHECKSUMS),
    "no meta": lambda path: (path / "CKPT.yaml").unlink(),
    "meta without a date": lambda path: (path / "CKPT.yaml").write_text("CER: 2.0\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, newest = save(tmp_path, 1.0, 2.0)
    DAMAGES[damage](newest)
    assert find_damage(newest) is not None
    assert recovered(tmp_path) == 1.0
    assert f"{newest} is skipped: " in caplog.text


def test_checksums_of_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / CHECKSUMS).write_text(json.dumps({"../secret": "0"}))
    assert find_damage(tmp_path / "model") == f"its {CHECKSUMS} cannot be read"


def test_run_of_speechbrain_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its checkpoints have no checksums; one whose save was killed is refused."""
    for value in (1.0, 2.0):
        parts = {"model": line(value)}
        newest = SpeechBrainCheckpointer(tmp_path, recoverables=parts).save_checkpoint()
    assert recovered(tmp_path) == 2.0
    assert f"{newest.path} has no checksums" in caplog.text
    cut(newest.path / "model.ckpt")
    with pytest.raises(SbkitError, match="away to resume from the previous checkpoint"):
        recovered(tmp_path)


def test_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    (newest,) = save(tmp_path, 1.0)
    meta = newest / "CKPT.yaml"
    meta.write_text(meta.read_text().replace("format: 2", "task: sbkit.tasks.asr.task.AsrTask"))
    with pytest.raises(ConfigError, match="has format 1, .*reads 2: the level .*Train the run aga"):
        recovered(tmp_path)


def test_second_run_in_folder_is_refused_until_first_ends(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with training(saves) as first:
        for second in (Checkpointer(saves).check_same_model, lambda: save(saves, 1.0)):
            with pytest.raises(SbkitError, match=f"Only one run at a time may save to {saves}"):
                second()
        assert recovered(saves) is None  # reading is allowed
        assert SavedCheckpoints(saves).find_whole(1) == []
        assert [path.name for path in saves.iterdir()] == [".lock"]

        first.kill()
        first.wait()
        save(saves, 0.5)  # although its worker is still there
        assert recovered(saves) == 0.5


def test_second_lock_of_a_process_is_refused_and_leaves_the_first(tmp_path: Path) -> None:
    """Its end released that of the first."""
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    lock = open_lock(run)  # as another process opens it
    with suppress(KeyboardInterrupt), locked_folder(run):
        for folder in (run, link, run / "../run"):
            with pytest.raises(ConfigError, match=f"{folder}, but this process is training there"):
                locked_folder(folder).__enter__()
        assert not try_lock(lock)
        raise KeyboardInterrupt
    assert try_lock(lock)
    os.close(lock)


def test_checkpointer_that_is_done_keeps_no_other_out(tmp_path: Path) -> None:
    """A cell that makes it runs again, or another one goes on in the same kernel."""
    first, second = checkpointer(tmp_path, line(2.0)), checkpointer(tmp_path, line(3.0))
    with suppress(KeyboardInterrupt), first.claimed():
        first.save_checkpoint()
        with pytest.raises(ConfigError, match="this process is training there"):
            second.save_checkpoint()
        raise KeyboardInterrupt
    second.save_checkpoint()
    assert recovered(tmp_path) == 3.0
