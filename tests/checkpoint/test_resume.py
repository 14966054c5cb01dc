"""A run goes on only as the run that it was: real runs, of the recipe and of SpeechBrain's."""

import shutil
from pathlib import Path

import pytest
import speechbrain as sb

import sbkit
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.runs import Workplace, one_thread
from tests.speechbrain_recipe import load_recipe, make_asr, run

pytestmark = pytest.mark.slow

Captured = pytest.CaptureFixture[str]


def test_leftover_tokenizer_of_failed_attempt_is_named(
    workplace: Workplace, tmp_path: Path, capsys: Captured
) -> None:
    sentence = f"{tmp_path / 'tokenizer.model'} was there before the first checkpoint and is used"
    for is_said in (False, True, False):
        assert workplace.train_here(tmp_path, "--check=False", "--number_of_epochs=1") == 0
        assert (sentence in capsys.readouterr().out) is is_said
        if not is_said:  # as where it was stopped before it saved
            shutil.rmtree(tmp_path / "checkpoints")


def test_speechbrain_checkpoint_is_resumed(
    workplace: Workplace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoints have no checksums, and its normalization a saver of its own."""
    steps = []
    for base, epochs in ((sb.Brain, 1), (sbkit.Brain, 2)):
        hparams = load_recipe(workplace.release, tmp_path, number_of_epochs=epochs)
        if base is sbkit.Brain:
            before = hparams["checkpointer"]
            hparams["checkpointer"] = Checkpointer(
                before.checkpoints_dir, recoverables=before.recoverables
            )
        with one_thread():
            brain = run(make_asr(base), hparams, {})
        steps.append(brain.optimizer_step)
    assert steps[1] == 2 * steps[0]
    assert "has no checksums" in caplog.text
