"""The notebooks of docs/notebooks/ run in a kernel, on a small corpus."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from sbkit.config.overrides import parse_overrides
from tests.runs import ROOT, TINY, Workplace

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SMALL = (*TINY, "--number_of_epochs=1")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_outputs_without_traces_of_a_machine(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    text = file.read_text("utf-8")
    advice = f"run: python -m docs.run_notebooks {file.stem}"
    assert not re.search(r"/root|/home|/tmp|Traceback|Warning", text), advice
    assert any(cell.get("outputs") for cell in notebook.cells), advice


def run_notebook(name: str, constant: str, value: object, folder: Path) -> tuple[str, int]:
    """Run a notebook with another value of a constant; return what it prints and its pictures.

    It runs in a new project, which holds links to the recipes and the YAMLs.
    """
    for part in ("hparams", "recipes"):
        (folder / part).symlink_to(ROOT / part)
    notebook = nbformat.read(ROOT / f"docs/notebooks/{name}.ipynb", as_version=4)
    line, count = f"{constant} = {value!r}", 0
    for cell in notebook.cells:
        cell.source, found = re.subn(rf"(?m)^{constant} = .+$", lambda _: line, cell.source)
        count += found
    assert count == 1
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
    outputs: list[Any] = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert not any(output.get("name") == "stderr" for output in outputs)
    printed = "".join(output.get("text", "") for output in outputs)
    return printed, sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("name", "printed", "pictures"),
    [("data", "sentence", 2), ("posteriors", "greedy", 3), ("first-hour", "*", 0)],
)
def test_notebook_runs_in_a_kernel(
    name: str,
    printed: str,
    pictures: int,
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    _, *options = workplace.arguments(tmp_path / "run", tiny=SMALL)
    overrides = parse_overrides(options)
    if name == "first-hour":
        del overrides["output_folder"], overrides["check"]
    text, num_pictures = run_notebook(name, "OVERRIDES", overrides, tmp_path)
    assert printed in text
    assert num_pictures >= pictures
    if name == "first-hour":
        assert "but ctc_lin.weight is not in it" in text
        assert (tmp_path / "results/first-model/config.json").is_file()


@pytest.mark.slow
def test_notebook_of_a_run_compares_four_decoders(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    models = ("--word_lm_order=2", "--token_lm_order=3", "--number_of_epochs=1")
    assert workplace.train_here(tmp_path / "run", *models) == 0
    printed, num_pictures = run_notebook("decoding", "RUN", str(tmp_path / "run"), tmp_path)
    lines = printed.split("wrong words\n")[1].splitlines()
    assert [line[:9].strip() for line in lines] == ["greedy", "beam", "own text", "hotwords"]
    assert num_pictures == 1
