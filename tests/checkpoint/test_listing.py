"""Checkpoints that are damaged are passed over, SpeechBrain's are taken, and both is said."""

from pathlib import Path

import pytest
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer

from sbkit.base.checksums import CHECKSUMS, find_damage
from sbkit.base.errors import SbkitError
from tests.checkpoint.saves import cut, flip, line, recovered, save

DAMAGES = {
    "cut weights": lambda path: cut(path / "model.ckpt"),
    "a flipped bit": lambda path: flip(path / "model.ckpt"),
    "no weights": lambda path: (path / "model.ckpt").unlink(),
    "cut meta": lambda path: cut(path / "CKPT.yaml"),
    "cut checksums": lambda path: cut(path / CHECKSUMS),
    "a stranger": lambda path: (path / "stranger").touch(),
    "no meta": lambda path: (path / "CKPT.yaml").unlink(),
    "meta without a date": lambda path: (path / "CKPT.yaml").write_text("CER: 2.0\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, newest = save(tmp_path, 1.0, 2.0)
    DAMAGES[damage](newest)
    assert find_damage(newest) is not None
    assert recovered(tmp_path) == 1.0
    assert f"{newest} is skipped: " in caplog.text


def test_when_all_are_damaged_nothing_starts_over_in_silence(tmp_path: Path) -> None:
    for path in save(tmp_path, 1.0, 2.0):
        cut(path / "model.ckpt")
    with pytest.raises(SbkitError, match="all 2 are damaged"):
        recovered(tmp_path)


def test_a_run_that_speechbrain_began_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoints have no checksums; one whose save was killed is refused, and not trained."""
    for value in (1.0, 2.0):
        parts = {"model": line(value)}
        newest = SpeechBrainCheckpointer(tmp_path, recoverables=parts).save_checkpoint()
    assert recovered(tmp_path) == 2.0
    assert f"{newest.path} has no checksums" in caplog.text
    cut(newest.path / "model.ckpt")
    with pytest.raises(SbkitError, match="away to resume from the one before"):
        recovered(tmp_path)
