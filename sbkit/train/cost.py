"""What a run took, in the figures that `sbkit check` predicts: steps, seconds and memory."""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.base.files import read_regular
from sbkit.checkpoint.integrity import LARGEST, UNREADABLE
from sbkit.train.memory import MemoryTracker, bytes_of

PREDICTION, SUMMARY = "prediction.json", "summary.json"  # in the run folder
LARGER = 1.02  # times all before: a step whose memory is measured


class CostRecorder:
    """Record the steps, seconds and memory of a run, from before its first step.

    Memory is that of tensors: on a GPU the most that torch allocated; elsewhere it is measured in
    the steps that are larger than all before them, a handful in a run, and in the first validation.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._model = device, [*model.parameters(), *model.buffers()]
        self._epochs, self._steps, self._first = 0, 0, 0
        self._started, self._seconds = 0.0, 0.0
        self._largest, self._peak = 0.0, 0
        self._tracker: MemoryTracker | None = None
        self._measuring, self._is_entered = ExitStack(), False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> "CostRecorder":
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring, also where a step was interrupted."""
        self.end_step()
        self._is_entered = False

    def begin_epoch(self, step: int) -> None:
        """Note when an epoch begins, and how many optimizer steps lie before it."""
        self._started, self._first = time.perf_counter(), step

    def end_epoch(self, step: int) -> None:
        """Note when an epoch ends, after its validation and checkpoint."""
        self._epochs += 1
        self._steps += step - self._first
        self._seconds += time.perf_counter() - self._started

    def begin_step(self, size: int) -> None:
        """Measure the memory of a step whose batch is larger than all before."""
        self.end_step()
        if size > LARGER * self._largest:
            self._largest = size
            self._measure()

    def begin_validation(self) -> None:
        """Measure the memory of the first validation."""
        if self._epochs == 0:
            self._measure()

    def end_step(self) -> None:
        """Stop measuring memory, where it was begun."""
        self._measuring.close()
        if self._tracker is not None:
            self._peak, self._tracker = max(self._peak, self._tracker.peak), None

    def summary(self, folder: Path, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """Return what was measured with what was predicted, None for what is not known.

        A run that did not train keeps what its summary says already.
        """
        if self._epochs == 0:
            earlier: dict[str, Any] = (_read(folder / SUMMARY) or {}).get("cost", {})
            return earlier
        outcome = {
            "steps_per_epoch": round(self._steps / self._epochs, 2),
            "seconds_per_epoch": round(self._seconds / self._epochs, 2),
            "peak_bytes": self._peak_bytes(optimizers.values()),
        }
        return {"prediction": _read(folder / PREDICTION), "outcome": outcome}

    def _measure(self) -> None:
        if self._is_entered and self._device.type != "cuda":
            self._tracker = self._measuring.enter_context(MemoryTracker(self._model))

    def _peak_bytes(self, optimizers: Iterable[Optimizer]) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        states = (state for optimizer in optimizers for state in optimizer.state.values())
        kept = (each for state in states for each in state.values())
        optimizer = bytes_of(each for each in kept if isinstance(each, Tensor))
        return bytes_of(self._model) + optimizer + self._peak if self._peak else None


def _read(file: Path) -> dict[str, Any] | None:
    """Read a mapping; None where there is none, for it may have been changed by hand."""
    try:
        found = json.loads(read_regular(file.resolve(), largest=LARGEST, what="A record"))
    except UNREADABLE:
        return None
    return found if isinstance(found, dict) else None
