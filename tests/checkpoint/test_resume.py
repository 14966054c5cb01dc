"""A run goes on only as the run that it was: real runs, of the recipe and of SpeechBrain's."""

import shutil
from pathlib import Path

import pytest
import speechbrain as sb

import sbkit
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.runs import Workplace, make_workplace, one_thread
from tests.speechbrain_recipe import load_recipe, make_asr, run

pytestmark = pytest.mark.slow

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(workplace, folder, "--number_of_epochs=1") == 0
    return folder


def train(workplace: Workplace, folder: Path, *options: str) -> int:
    return workplace.train_here(folder, "--check=False", *options)


@pytest.fixture
def begun(trained: Path, tmp_path: Path) -> Path:
    """Give a run of one epoch that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_tokenizer_of_an_attempt_that_saved_nothing_is_named(
    begun: Path, workplace: Workplace, capsys: Captured
) -> None:
    shutil.rmtree(begun / "checkpoints")
    assert train(workplace, begun, "--number_of_epochs=1") == 0
    said = f"{begun / 'tokenizer.model'} was there before the first checkpoint, and is used"
    assert said in capsys.readouterr().out
    assert train(workplace, begun, "--number_of_epochs=1") == 0
    assert said not in capsys.readouterr().out


def test_what_speechbrain_saved_goes_on(
    workplace: Workplace, tmp_path: Path, capsys: Captured
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
    assert "has no checksums" in capsys.readouterr().out
