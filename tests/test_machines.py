"""Real machines: output that cannot be written, users without a home, disks that refuse."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import TensorDataset

from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.logs.run_log import read_log
from tests import processes
from tests.runs import Workplace
from tests.train.lines import LineBrain, brain_of, line, rows

# Output that cannot be written

FULL_DISK = """
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1), os.dup2(full, 2)
"""
LOST_TERMINAL = """
leader, terminal = pty.openpty()
os.dup2(terminal, 1), os.dup2(terminal, 2)
sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
"""
CLOSED_PIPE = """
reader, pipe = os.pipe()
os.dup2(pipe, 1), os.dup2(pipe, 2), os.close(reader)
sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
"""
CLOSED = (
    "os.close(1), os.close(2); sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None"
)
TRAINING = """
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import TensorDataset
from sbkit.base.process import run_main
from sbkit.checkpoint import Checkpointer
from sbkit.logs import log_to_screen
from tests.train.lines import LineBrain, brain_of, line, rows

class Printing(LineBrain):
    def on_fit_batch_end(self, *_):
        if self.optimizer_step == 2 and leader:
            os.close(leader)  # no SIGHUP comes: this process does not belong to the terminal
        print("a step")

def main():
    model, epochs, data = line(), EpochCounter(2), TensorDataset(*rows(8))
    checkpointer = Checkpointer(sys.argv[1], recoverables={"model": model, "epochs": epochs})
    brain = brain_of(Printing, model=model, hparams={"log_every": 1}, checkpointer=checkpointer)
    with log_to_screen():
        brain.fit(epochs, data, data, train_loader_kwargs={"batch_size": 2})
    sys.exit(0 if brain.optimizer_step == 8 else 1)

run_main(main)
"""


@pytest.mark.parametrize("output", [FULL_DISK, LOST_TERMINAL, CLOSED_PIPE, CLOSED])
def test_run_goes_on_without_its_output(output: str, tmp_path: Path) -> None:
    code = f"import os, pty, sys\nleader = None\n{output}\n{TRAINING}"
    assert processes.run(["-c", code, tmp_path]).returncode == 0
    newest = Checkpointer(tmp_path).find_checkpoint()
    assert newest is not None
    assert newest.meta["epoch"] == 2


@pytest.mark.slow
def test_whole_run_ends_well_though_disk_of_its_output_is_full(
    workplace: Workplace, tmp_path: Path
) -> None:
    command = workplace.arguments(tmp_path, "--number_of_epochs=1")
    code = f"import os, runpy, sys\n{FULL_DISK}\nrunpy.run_path('train.py', run_name='__main__')"
    process = processes.run(["-c", code, *command], SBKIT_CACHE=workplace.cache)
    assert process.returncode == 0
    assert len(read_log(tmp_path / "train_log.jsonl")) > 1
    assert "next: sbkit export" in (tmp_path / "train.log").read_text()


def test_epoch_is_saved_before_anything_is_said_about_it(tmp_path: Path) -> None:
    model, epochs, data = line(), EpochCounter(2), TensorDataset(*rows(8))
    checkpointer = Checkpointer(tmp_path, recoverables={"model": model})
    brain = brain_of(LineBrain, model=model, hparams={}, checkpointer=checkpointer)
    saved_epochs = {}

    class Screen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("epoch "):
                newest = Checkpointer(tmp_path).find_checkpoint()
                saved_epochs[record.getMessage()[:9]] = newest and newest.meta["epoch"]

    screen = Screen()
    logger = logging.getLogger("sbkit.logs.progress")
    logger.addHandler(screen)
    try:
        brain.fit(epochs, data, data)
    finally:
        logger.removeHandler(screen)
    assert saved_epochs == {"epoch 1/2": 1, "epoch 2/2": 2}


# Users without a name or a home

OPTIMIZER = """
import sbkit, torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
from torch._inductor.runtime.cache_dir_utils import cache_dir
from sbkit.data.cache import default_cache
print(cache_dir(), default_cache())
"""
# The right to read all files: Python and this checkout may be root's
AS_ANOTHER_USER = "setpriv --reuid 12345 --regid 12345 --clear-groups".split()
AS_ANOTHER_USER += "--inh-caps +dac_read_search --ambient-caps +dac_read_search".split()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("home", [None, "/root"])
def test_user_that_passwd_does_not_list_has_caches(home: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        os.chown(folder, 12345, 12345)
        environment = {"PATH": os.environ["PATH"], "TMPDIR": folder}
        environment |= {} if home is None else {"HOME": home}
        process = subprocess.run(
            [*AS_ANOTHER_USER, sys.executable, "-c", OPTIMIZER],
            capture_output=True,
            text=True,
            check=True,
            cwd=processes.ROOT,
            env=environment,
        )
    assert process.stdout.split() == [
        f"{folder}/torchinductor_user-12345",
        f"{folder}/sbkit-12345/sbkit",
    ]
