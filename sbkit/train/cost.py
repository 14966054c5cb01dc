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

from sbkit.train.memory import MemoryTracker, bytes_of

PREDICTION, SUMMARY = "prediction.json", "summary.json"  # in the run folder
LARGER = 1.02  # than all before: a step that is weighed


class CostRecorder:
    """Watch a run from before its first step.

    Memory is that of tensors: on a GPU what torch allocated at most; elsewhere steps are weighed
    that are larger than all before them, a handful in a run, and the first validation.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._model = device, [*model.parameters(), *model.buffers()]
        self._epochs, self._steps, self._first = 0, 0, 0
        self._started, self._seconds = 0.0, 0.0
        self._largest, self._peak = 0.0, 0
        self._weight: MemoryTracker | None = None
        self._weighing, self._watching = ExitStack(), False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> "CostRecorder":
        """Weigh what is begun from here on."""
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measure_memory, also where a step broke off: nothing may go on being weighed."""
        self.end_step()
        self._watching = False

    def begin_epoch(self, step: int) -> None:
        """Note when an epoch begins, and the optimizer's steps before it."""
        self._started, self._first = time.perf_counter(), step

    def end_epoch(self, step: int) -> None:
        """Note that it is over, validation and checkpoint included."""
        self._epochs += 1
        self._steps += step - self._first
        self._seconds += time.perf_counter() - self._started

    def begin_step(self, size: int) -> None:
        """Weigh a step whose batch is larger than all before."""
        self.end_step()
        if size > LARGER * self._largest:
            self._largest = size
            self._weigh()

    def begin_validation(self) -> None:
        """Weigh the first one."""
        if self._epochs == 0:
            self._weigh()

    def end_step(self) -> None:
        """Stop measure_memory, if it was begun."""
        self._weighing.close()
        if self._weight is not None:
            self._peak, self._weight = max(self._peak, self._weight.peak), None

    def summary(self, folder: Path, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """Put what was taken beside what was predicted, None for what is not known.

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

    def _weigh(self) -> None:
        if self._watching and self._device.type != "cuda":
            self._weight = self._weighing.enter_context(MemoryTracker(self._model))

    def _peak_bytes(self, optimizers: Iterable[Optimizer]) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        states = (state for optimizer in optimizers for state in optimizer.state.values())
        kept = (each for state in states for each in state.values())
        optimizer = bytes_of(each for each in kept if isinstance(each, Tensor))
        return bytes_of(self._model) + optimizer + self._peak if self._peak else None


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
