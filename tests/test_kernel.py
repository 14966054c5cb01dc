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
    def forward(self, x):
        return super().forward(x) * FACTOR
"""
CELL = """
from pathlib import Path
import my_models
from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit import Run
from sbkit.config.overrides import parse_overrides
from tests.runs import TINY

class MyBrain(AsrBrain):
    def on_fit_start(self):
        super().on_fit_start()
        print("my brain trains")

class Mine(AsrRecipe):
    brain = MyBrain

def train(name):
    overrides = {{**parse_overrides(TINY), "data_folder": {data!r}, "number_of_epochs": 1}}
    Run("mine.yaml", overrides | {{"output_folder": name}}, recipe=Mine).train()

def edit(module, old, new):
    file = Path(module)
    file.write_text(file.read_text().replace(old, new))
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
    assert (error.ename, "step 6" in error.evalue) == ("StopRequestedError", True)
    lines = [[*printed_lines(outputs)] for outputs in (interrupted, resumed, logged)]
    assert lines[0] == ["before", "epoch 1/3 step 4"]
    assert lines[1] == ["before", "epoch 2/3 step 8", "epoch 3/3 step 12"]
    assert lines[2] == ["Resuming after step 12", "epoch 4/4 step 16"]


def printed_lines(outputs: Sequence[Any]) -> Iterator[str]:
    """Yield the printed lines, without figures."""
    for output in outputs:
        if output.output_type == "stream":
            for text in filter(None, output.text.splitlines()):
                yield re.split(r" loss|,", text)[0]


def test_run_needs_a_restart_once_a_module_was_edited_but_not_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workplace: Workplace
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    text = (ROOT / "hparams/ctc.yaml").read_text()
    text = text.replace("ctc_lin: !new:torch.nn.Linear", "ctc_lin: !new:my_models.Head")
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "my_models.py").write_text(HEAD)
    (tmp_path / "my_sizes.py").write_text("FACTOR = 1")
    cell = CELL.format(data=str(workplace.release))
    cells = ["edit('my_models.py', '* F', '+ F')\ntrain('a')", "edit('my_models.py', '+ F', '* F')"]
    cells += ["train('a')", cell.replace("my brain", "my other brain"), "train('b')"]
    cells += ["edit('my_sizes.py', '1', '2')\ntrain('c')"]
    outputs = run_cells([cell, *cells], tmp_path)
    lines = [line for output in outputs for line in printed_lines(output)]
    trained = [line for line in lines if line.endswith("brain trains")]
    assert trained == ["my brain trains", "my other brain trains"]
    for output, module in ((outputs[1], "my_models"), (outputs[-1], "my_sizes")):
        error = output[-1]
        assert (error.ename, error.evalue.split()[0]) == ("ConfigError", module)
    assert (tmp_path / "b/bundle/my_sizes.py").read_text() == "FACTOR = 1"
