"""A step whose loss or gradient is not finite: which utterances it had.

Of a micro-batch only names and lengths are kept until the host looks at the step's flags.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.data.batch import Batch
from sbkit.distributed.ranks import rank

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"
MOST_SEEN = 1024  # micro-batches of a step; a recipe without an optimizer never ends one


@dataclass(frozen=True)
class Step:
    """A step that the host has not looked at yet: its micro-batches with their summed losses ().

    flags (2,), on the device: losses that are not finite, over all ranks; 1 if it was skipped.
    """

    epoch: int
    step: int
    batches: list[tuple[dict[str, Any], Tensor]]
    flags: Tensor


class NonFiniteRecorder:
    """Keep the last steps until the host looks at their flags, and write down the bad ones."""

    def __init__(self, run_folder: Path | None) -> None:
        self._folder = run_folder and run_folder / FOLDER
        self._batches: deque[tuple[dict[str, Any], Tensor]] = deque(maxlen=MOST_SEEN)
        self._steps: list[Step] = []
        self.epoch = 0

    def record(self, batch: Any, lost: Tensor) -> None:
        """Remember the utterances of a micro-batch of the step to come, and their lengths."""
        described: dict[str, Any] = {"ids": ids_of(batch)}
        if isinstance(batch, Batch):
            described["samples"] = batch.audio_lengths.tolist()
        self._batches.append((described, lost.detach()))

    def end_step(self, step: int, flags: Tensor) -> None:
        """Add a step of the micro-batches recorded since the last one."""
        self._steps.append(Step(self.epoch, step, list(self._batches), flags))
        self._batches.clear()

    def flush(self, *, overflow_is_usual: bool) -> tuple[int, int]:
        """Read all flags in one transfer; return the skipped steps, and how many of them are bad.

        overflow_is_usual: with a GradScaler a step is also skipped when the scaled gradient
        overflows; only a loss that is not finite is bad then.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return 0, 0
        flags = torch.stack([step.flags for step in steps]).tolist()
        bad = 0
        for step, (losses, was_skipped) in zip(steps, flags, strict=True):
            if losses or (was_skipped and not overflow_is_usual):
                bad += 1
                self._write(step, "loss" if losses else "gradient")
        return int(sum(was_skipped for _, was_skipped in flags)), bad

    def check_count(self, count: int, patience: int) -> None:
        """Stop a run in which too many steps of an epoch were bad."""
        if count > patience:
            where = f" (they are in {self._folder})" if self._folder else ""
            raise SbkitError(
                f"At most {patience} steps of an epoch (`nonfinite_patience`) may have a loss or a "
                f"gradient that is not finite, but {count} had{where}. Lower `lr`, or find the "
                "part with torch.autograd.set_detect_anomaly; the last checkpoint is from before."
            )

    def _write(self, step: Step, what: str) -> None:
        """Write down this rank's part; with a loss to blame, only the ranks that have it."""
        batches = [
            described | {"loss_is_finite": bool(lost.isfinite())}
            for described, lost in step.batches
        ]
        is_fine = batches and all(each["loss_is_finite"] for each in batches)
        if self._folder is None or (what == "loss" and is_fine):
            return
        file = self._folder / f"step-{step.step}-rank-{rank()}.json"
        place = {"epoch": step.epoch, "step": step.step, "rank": rank()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, to_json({"what": what, **place, "micro_batches": batches}))
        logger.warning(
            f"step {step.step} was skipped: its {what} is not finite; its utterances are in {file}"
        )


def ids_of(batch: Any) -> list[str]:
    """Name the utterances of a batch, sbkit's or SpeechBrain's; others may have none."""
    ids = batch.ids if isinstance(batch, Batch) else getattr(batch, "id", None)
    return [str(each) for each in ids] if isinstance(ids, list) else []


@contextmanager
def explained_memory(batch: Any, knob: str = "batch_seconds") -> Iterator[None]:
    """Raise SbkitError, with what to lower, where a batch does not fit into memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = (
            f"{len(batch)} utterances, {batch.seconds:.0f} s, " if isinstance(batch, Batch) else ""
        )
        raise SbkitError(
            f"Each batch must fit into memory, but one ({size}{', '.join(ids_of(batch)[:3])}, ...) "
            f"did not. Lower --{knob} or --max_seconds, raise --grad_accumulation_factor, or take "
            "a smaller model."
        ) from error
