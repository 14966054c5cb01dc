"""A notebook's kernel survives an interrupted cell; its cells show and run what is there now."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.runs import ROOT, Workplace

pytestmark = pytest.mark.slow(seconds=20)

MAKE = """
import os, signal
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import TensorDataset
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.train.lines import LineBrain, brain_of, line, rows

class Interrupted(LineBrain):
    interrupts_at = {6}

    def on_fit_batch_end(self, *_):
        if self.optimizer_step in self.interrupts_at:
            self.interrupts_at = {}
            os.kill(os.getpid(), signal.SIGINT)

model, epochs, data = line(), EpochCounter(3), TensorDataset(*rows(8))
checkpointer = Checkpointer("checkpoints", recoverables={"model": model, "epochs": epochs})
brain = brain_of(Interrupted, model=model, hparams={"log_every": 1}, checkpointer=checkpointer)
"""
FIT = """
print("before")
brain.fit(epochs, data, data, train_loader_kwargs={"batch_size": 2})
"""
LOGGED = """
from sbkit.logs.handlers import log_to_screen
epochs.limit = 4
with log_to_screen():
    brain.fit(epochs, data, data, train_loader_kwargs={"batch_size": 2})
"""
HEAD = """
import torch
from my_sizes import FACTOR

class Head(torch.nn.Linear):
    factor = FACTOR
"""
TRAIN = """
from pathlib import Path
from sbkit import Run
from sbkit.config.overrides import parse_overrides
from tests.runs import TINY

def train(name, factor):
    Path("my_sizes.py").write_text(f"FACTOR = {{factor}}")
    overrides = {{**parse_overrides(TINY), "data_folder": {data!r}, "number_of_epochs": 1}}
    run = Run("mine.yaml", overrides | {{"output_folder": name}})
    run.train()
    print("head", *[part.factor for part in run.model.modules() if hasattr(part, "factor")])
"""


def run_cells(sources: Sequence[str], folder: Path) -> list[list[Any]]:
    """Run cells in a kernel, errors included; return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, allow_errors=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


def test_interrupted_cell_is_run_again_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the kernel finds `tests`
    _, interrupted, resumed, logged = run_cells([MAKE, FIT, FIT, LOGGED], tmp_path)
    error = interrupted[-1]
    assert error.evalue == "Stopped at step 6; checkpoint saved. The same command or call resumes."
    lines = [[*printed_lines(outputs)] for outputs in (interrupted, resumed, logged)]
    assert lines[0] == ["before", "epoch 1/3 step 4"]
    assert lines[1] == ["before", "epoch 2/3 step 8", "epoch 3/3 step 12"]
    assert lines[2] == ["Resuming after step 12", "epoch 4/4 step 16"]
    for outputs in (interrupted, resumed, logged):  # the live line, which is empty at the end
        (live,) = [output for output in outputs if output.output_type == "display_data"]
        assert live.data == {"text/plain": ""}


def printed_lines(outputs: Sequence[Any]) -> Iterator[str]:
    """Yield the printed lines, without figures and without what a live line clears."""
    for output in outputs:
        if output.output_type == "stream":
            for text in filter(None, output.text.splitlines()):
                yield re.split(r" loss|,", text)[0]


def test_edited_module_takes_effect_in_the_next_run_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workplace: Workplace
) -> None:
    """The old class used to train, and the bundle to hold the new source beside its weights."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    text = (ROOT / "hparams/ctc.yaml").read_text()
    text = text.replace("ctc_lin: !new:torch.nn.Linear", "ctc_lin: !new:my_models.Head")
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "my_models.py").write_text(HEAD)
    own_import = "import sys; del sys.modules['my_sizes']; import my_sizes"
    trains = ["train('a', 1)", "train('b', 3)", own_import, "train('c', 5)"]
    outputs = run_cells([TRAIN.format(data=str(workplace.release)), *trains], tmp_path)
    lines = [line for cell in outputs for line in printed_lines(cell)]
    assert [line for line in lines if line.startswith("head")] == ["head 1", "head 3"]
    assert outputs[-1][-1].evalue.startswith("my_sizes.py has changed since this kernel imported")
    for name, factor in (("a", 1), ("b", 3)):
        source = (tmp_path / name / "bundle/my_sizes.py").read_text()
        assert source == f"FACTOR = {factor}"
