"""A recipe whose batches have no end trains `epoch_length` of them in each epoch."""

import re
import sys
from pathlib import Path

import pytest

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT, Workplace, records_of, stopped_after

pytestmark = pytest.mark.slow
RECIPE = (ROOT / "tests/user_parts/my_endless.py").read_text("utf-8")  # as on the page
OPTIONS = ("--number_of_epochs=2", "--log_every=1")


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "endless.py").write_text(RECIPE)
    (tmp_path / "endless.yaml").write_text(
        f"base: {ROOT}/hparams/ctc.yaml\nrecipe: endless.Endless\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "endless", raising=False)  # of the other test
    return tmp_path / "endless.yaml"


def test_epochs_end_and_a_stopped_run_takes_the_steps_that_are_left(
    workplace: Workplace, tmp_path: Path, yaml: Path
) -> None:
    with stopped_after(7):
        assert workplace.train_here(tmp_path / "run", *OPTIONS, yaml=yaml) == ASKED_TO_STOP
    assert workplace.train_here(tmp_path / "run", *OPTIONS, yaml=yaml) == 0
    steps = [record["step"] for record in records_of(tmp_path / "run", "step")]
    validated = [record["step"] for record in records_of(tmp_path / "run", "epoch")]
    assert (steps, validated) == ([*range(1, 11)], [5, 10])


def test_loader_without_a_length_is_refused(
    workplace: Workplace, tmp_path: Path, yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(r"LoopedLoader\((\w+), epoch_length=5\)", r"\1", RECIPE)
    (tmp_path / "endless.py").write_text(text.replace("Endless", "Unwrapped"))
    yaml.write_text(yaml.read_text().replace("Endless", "Unwrapped"))
    assert sbkit(["check", *workplace.arguments(tmp_path / "run", yaml=yaml)]) in (1, BAD_INPUT)
    output = " ".join(capsys.readouterr())
    assert f"{yaml}:2" in output and "has no length, so no epoch would end" in output
