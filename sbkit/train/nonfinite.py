"""Steps whose loss or gradient is not finite, batches that exceed the memory, their utterances.

Only the ids of a micro-batch are stored until the host reads the step's flags.
"""

import logging
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sbkit.base.errors import SbkitError, translate
from sbkit.base.messages import listed
from sbkit.data.batch import Batch
from sbkit.distributed.ranks import gather_over_ranks

logger = logging.getLogger(__name__)

MAX_MICRO_BATCHES = 1024  # those of a step; a recipe without an optimizer never ends one
MAX_LOGGED_IDS = 8


@dataclass(frozen=True)
class UnreadStep:
    """A step whose flags the host has not read yet.

    batches: the ids of each micro-batch, with its summed loss ().
    flags (2,), on the device: losses that are not finite, over all ranks; 1 if it was skipped.
    """

    step: int
    batches: list[tuple[list[str], Tensor]]
    flags: Tensor


class NonFiniteRecorder:
    """Hold the last steps until the host reads their flags, and log the bad ones."""

    def __init__(self) -> None:
        self._batches: deque[tuple[list[str], Tensor]] = deque(maxlen=MAX_MICRO_BATCHES)
        self._steps: list[UnreadStep] = []

    def record(self, batch: Any, loss: Tensor) -> None:
        """Remember the utterances of a micro-batch and their summed loss ()."""
        self._batches.append((ids_of(batch), loss.detach()))

    def end_step(self, step: int, flags: Tensor) -> None:
        self._steps.append(UnreadStep(step, list(self._batches), flags))
        self._batches.clear()

    def flush(self, *, overflow_is_usual: bool) -> tuple[int, int]:
        """Read all flags in one transfer; return how many steps were skipped, and how many bad.

        overflow_is_usual: with a GradScaler a step is also skipped when the scaled gradient
        overflows; then only a loss that is not finite is bad.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return 0, 0
        flags = torch.stack([step.flags for step in steps]).tolist()
        num_bad = 0
        for step, (losses, was_skipped) in zip(steps, flags, strict=True):
            if losses or (was_skipped and not overflow_is_usual):
                num_bad += 1
                log_bad_step(step, "loss" if losses else "gradient")
        return int(sum(was_skipped for _, was_skipped in flags)), num_bad

    def check_count(self, count: int, patience: int) -> None:
        if count > patience:
            raise SbkitError(
                f"In {count} steps of this epoch the loss or a gradient was not finite; "
                f"`nonfinite_patience` allows {patience}. Lower `lr`.",
                keys=("nonfinite_patience",),
            )


def log_bad_step(step: UnreadStep, fault: str) -> None:
    """Name utterances of a bad step of all ranks; for a bad loss, of the micro-batches with it."""
    batches = [ids for ids, loss in step.batches if fault == "gradient" or not loss.isfinite()]
    gathered = gather_over_ranks([*chain.from_iterable(batches)])
    names = listed(chain.from_iterable(gathered), max_names=MAX_LOGGED_IDS)
    utterances = f" (utterances: {names})" if names else ""
    logger.warning(f"step {step.step} was skipped: its {fault} is not finite{utterances}")


def ids_of(batch: Any) -> list[str]:
    """Name the utterances of a batch of sbkit's or SpeechBrain's; other batches may have none."""
    ids = batch.ids if isinstance(batch, Batch) else getattr(batch, "id", None)
    return [str(name) for name in ids] if isinstance(ids, list) else []


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device has no memory left; for the CPU, torch has no class of error."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def memory_errors(batch: Any, setting: str = "batch_seconds") -> AbstractContextManager[None]:
    """Raise SbkitError, naming the settings to lower, if a batch does not fit into memory."""

    def describe(error: RuntimeError) -> str | None:
        if not is_out_of_memory(error):
            return None
        ids = ids_of(batch)
        size = f" of {batch.seconds:.0f} s" if isinstance(batch, Batch) else ""
        names = f" ({listed(ids, max_names=3)})" if ids else ""
        return (
            f"A batch{size}{names} does not fit into memory. Lower `{setting}` or `max_seconds`, "
            "or raise `grad_accumulation_factor`."
        )

    return translate(RuntimeError, lambda text: SbkitError(text, keys=(setting,)), describe)
