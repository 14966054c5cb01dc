"""The notebooks of docs/notebooks/ run as scripts, on a small corpus."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from sbkit.config.overrides import parse_overrides
from tests.runs import ROOT, TINY, Workplace

MAX_LINES = 90
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.py"))
SMALL = (*TINY, "--number_of_epochs=2")


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch, workplace: Workplace) -> Iterator[None]:
    """Draw into memory; restore what notebooks change."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.setattr(sys, "path", [*sys.path])
    matplotlib.use("Agg")
    with pyplot.rc_context():
        yield
    pyplot.close("all")


def run_notebook(name: str, constant: str, value: object) -> list[str]:
    """Run a notebook with another value of a constant; return the titles of what it draws."""
    notebook = ROOT / f"docs/notebooks/{name}.py"
    line, text = f"{constant} = {value!r}", notebook.read_text("utf-8")
    source, count = re.subn(rf"(?m)^{constant} = .+$", lambda _: line, text)
    assert count == 1
    exec(compile(source, notebook, "exec"), {"__name__": "__main__"})
    figures = map(pyplot.figure, pyplot.get_fignums())
    return [axis.get_title() for figure in figures for axis in figure.axes]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_are_short(notebook: Path) -> None:
    assert len(notebook.read_text("utf-8").splitlines()) <= MAX_LINES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed", "drawn"),
    [
        ("data", "sentence  ", ["Waveform", "Log-mel features", "Speed 90 %", "Speed 110 %"]),
        ("posteriors", "greedy     ", ["Validation set by epoch", "Posteriors"]),
    ],
)
def test_notebook_of_data_runs(
    name: str,
    printed: str,
    drawn: list[str],
    workplace: Workplace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, *options = workplace.arguments(tmp_path / "run", tiny=SMALL)
    overrides = parse_overrides(options)
    assert run_notebook(name, "OVERRIDES", overrides)[: len(drawn)] == drawn
    assert printed in capsys.readouterr().out


@pytest.mark.slow
def test_notebook_of_a_run_compares_four_decoders(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("--word_lm_order=2", "--token_lm_order=3", "--number_of_epochs=1")
    assert workplace.train_here(tmp_path / "run", *models) == 0
    capsys.readouterr()
    run = str(tmp_path / "run")
    assert run_notebook("decoding", "RUN", run) == ["Words with their confidences"]
    lines = capsys.readouterr().out.split("wrong words\n")[1].splitlines()
    decoders = [line[:9].strip() for line in lines]
    assert decoders == ["greedy", "beam", "own text", "hotwords"]
