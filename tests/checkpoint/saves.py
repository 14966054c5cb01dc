"""Save and recover checkpoints of one small layer, and lock a folder as a run does."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sbkit.checkpoint.checkpointer import Checkpointer
from tests.processes import Process


def line(value: float, rows: int = 2) -> nn.Linear:
    """Make a layer whose every weight is ``value``."""
    layer = nn.Linear(3, rows)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


def checkpointer(folder: Path, model: nn.Module, **options: Any) -> Checkpointer:
    return Checkpointer(folder, recoverables={"model": model}, **options)


def save(folder: Path, *values: float) -> list[Path]:
    """Save models of constant weights one after the other; CER is the weight."""
    paths = []
    for value in values:
        saved = checkpointer(folder, line(value)).save_checkpoint(meta={"CER": value})
        assert saved is not None
        paths.append(saved.path)
    return paths


def recovered(folder: Path, **keys: Any) -> float | None:
    """Return the weight of the checkpoint that is recovered; None if there is none."""
    model = line(-1.0)
    if checkpointer(folder, model).recover_if_possible(**keys) is None:
        return None
    return float(model.bias[0].detach())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


# A run with a worker process that outlives it, as workers of a DataLoader do for a while
TRAINING = """
import os, sys, time
from sbkit.checkpoint.checkpointer import Checkpointer

os.setsid()
with Checkpointer(sys.argv[1]).claimed():
    if os.fork() == 0:
        print("at work", flush=True)  # the inherited locks are closed by now
    time.sleep(60)
"""


@contextmanager
def training(folder: Path) -> Iterator[Process]:
    """Lock a folder from another process, as a run does."""
    process = Process(["-c", TRAINING, folder])
    try:
        while not process.output()[0]:
            assert process.poll() is None, process.output()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
