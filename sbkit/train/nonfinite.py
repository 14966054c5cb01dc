"""A step whose loss or gradient is not finite: who was in it, and how to look at it again."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.units import samples_to_seconds
from sbkit.checkpoint.rng import TorchState
from sbkit.data.batch import Batch, TextBatch
from sbkit.distributed.ranks import rank

FOLDER = "nonfinite"
KEPT = 3  # bad steps of a rank that can be replayed, the newest; each holds the whole model


@dataclass(frozen=True)
class Record:
    """A micro-batch as the host had it, and the random state that it was computed from."""

    batch: Any
    random: TorchState
    lost: Tensor  # (): the summed loss, on the device


@dataclass(frozen=True)
class Step:
    """A step that the host has not looked at yet.

    flags (2,), on the device: losses that are not finite, over all ranks; 1 if it was skipped.
    """

    step: int
    seen: tuple[Record, ...]
    flags: Tensor


class NonFiniteRecorder:
    """Keep the last steps until the host looks at their flags, and write down the bad ones."""

    def __init__(self, run_folder: Path | None, modules: nn.Module) -> None:
        self._folder = run_folder and run_folder / FOLDER
        self._modules = modules
        self._seen: list[Record] = []
        self._steps: list[Step] = []

    def record(self, batch: Any, random: TorchState, lost: Tensor) -> None:
        """Remember a micro-batch of the step to come."""
        self._seen.append(Record(batch, random, lost.detach()))

    def end_step(self, step: int, flags: Tensor) -> None:
        """Say what came of the micro-batches seen."""
        self._steps.append(Step(step, tuple(self._seen), flags))
        self._seen = []

    def flush(self, *, overflow_is_usual: bool) -> tuple[int, int]:
        """Read all flags in one transfer; give the skipped steps, and how many of them are bad.

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

    def refuse_more(self, count: int, patience: int) -> None:
        """Stop a run in which too many steps of an epoch were bad."""
        if count > patience:
            where = f" (they are in {self._folder})" if self._folder else ""
            raise SbkitError(
                f"At most {patience} steps of an epoch (`nonfinite_patience`) may have a loss or a "
                f"gradient that is not finite, but {count} had{where}. Lower `lr`, or fix what "
                "`sbkit replay` names; the last checkpoint is from before."
            )

    def _write(self, step: Step, what: str) -> None:
        """Write down this rank's part; with a loss to blame, only the ranks that have it."""
        finite = [bool(seen.lost.isfinite()) for seen in step.seen]
        if self._folder is None or (what == "loss" and finite and all(finite)):
            return
        batches = [
            describe(seen.batch) | {"loss_is_finite": good}
            for seen, good in zip(step.seen, finite, strict=True)
        ]
        record = {"what": what, "step": step.step, "rank": rank(), "micro_batches": batches}
        file = self._folder.resolve() / f"step-{step.step}-rank-{rank()}.json"
        replay = replay_command(file) if self._keep(step, file.with_suffix(".pt")) else None
        with _said(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, to_json(record | {"replay": replay}, indent=1))

    def _keep(self, step: Step, file: Path) -> bool:
        """Save what a replay needs, unless the batches are of a kind that only a recipe knows."""
        if not step.seen or not all(isinstance(seen.batch, Batch) for seen in step.seen):
            return False
        micro_batches = [
            {"batch": seen.batch.to(torch.device("cpu")).to_plain(), "random": seen.random}
            for seen in step.seen
        ]
        saved = {"modules": self._modules.state_dict(), "micro_batches": micro_batches}
        beside = file.with_suffix(".tmp")
        with _said(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            _make_room(file.parent)
            try:
                torch.save(saved, beside)
                beside.replace(file)
            finally:
                beside.unlink(missing_ok=True)
            return True
        return False


def _make_room(folder: Path) -> None:
    """Remove all but the newest of this rank's models, so that there are `KEPT` with the next."""
    models = folder.glob(f"step-*-rank-{rank()}.pt")
    for file in sorted(models, key=lambda each: each.stat().st_mtime)[: 1 - KEPT]:
        file.unlink()


@contextmanager
def _said(file: Path) -> Iterator[None]:
    """Say that a file could not be written, and go on: the step is skipped all the same."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
        print(f"{file} could not be written ({error}); the run goes on.", file=sys.stderr)


def replay_command(file: Path) -> str:
    """Write the command that replays a batch, wherever it is given.

    It goes where the run was started, from where the YAML's relative paths lead.
    """
    command = ["sbkit", "replay", str(file)]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"


def ids_of(batch: Any) -> list[str]:
    """Name the utterances of a batch, sbkit's or SpeechBrain's."""
    return list(getattr(batch, "ids", getattr(batch, "id", ())))


def describe(batch: Any) -> dict[str, Any]:
    """Name the utterances of a batch and their lengths, as far as its kind tells."""
    described: dict[str, Any] = {"ids": ids_of(batch)}
    if isinstance(batch, Batch):
        described["seconds"] = [samples_to_seconds(each) for each in batch.audio_lengths.tolist()]
    if isinstance(batch, TextBatch):
        described["labels"] = batch.token_lengths.tolist()
    return described
