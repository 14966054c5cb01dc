"""A step whose loss or gradient is not finite: which utterances it had, and how to replay it.

Of a micro-batch only the names, the lengths and the random state are kept until the host looks at
the step's flags: the store is deterministic, so the sampler's plan makes the batch again. Memory
grows neither with the size of a batch nor, beyond some kilobytes a step, with `log_every`.
"""

import copy
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically, written_beside
from sbkit.checkpoint.rng import TorchState
from sbkit.data.batches.batch import Batch, TextBatch
from sbkit.data.batches.sampler import TrainSampler
from sbkit.distributed.ranks import rank

FOLDER = "nonfinite"
MOST_SEEN = 1024  # micro-batches of a step; a recipe without an optimizer never ends one
KEPT = 3  # bad steps of a rank that can be replayed, the newest; each holds the whole model


@dataclass(frozen=True)
class Record:
    """What it takes to make a micro-batch again.

    described: its utterances by name and length; epoch, number: its place in the sampler's plan,
    from 1; None for one that no TrainSampler planned; random: what it was computed from.
    """

    described: dict[str, Any]
    place: tuple[int, int] | None
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
        self._seen: deque[Record] = deque(maxlen=MOST_SEEN)
        self._steps: list[Step] = []
        self._sampler: TrainSampler | None = None
        self._epoch = 0

    def begin_epoch(self, sampler: Any, epoch: int) -> None:
        """Note the sampler that plans the epoch's batches, if it is one of sbkit's."""
        self._sampler = sampler if isinstance(sampler, TrainSampler) else None
        self._epoch = epoch

    def record(self, batch: Any, random: TorchState, lost: Tensor, number: int = 0) -> None:
        """Remember a micro-batch of the step to come, the ``number``-th of its epoch from 1."""
        is_planned = self._sampler is not None and isinstance(batch, Batch) and number > 0
        place = (self._epoch, number) if is_planned else None
        self._seen.append(Record(describe(batch), place, random, lost.detach()))

    def end_step(self, step: int, flags: Tensor) -> None:
        """Add a step of the micro-batches recorded since the last one."""
        self._steps.append(Step(step, tuple(self._seen), flags))
        self._seen.clear()

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
                f"gradient that is not finite, but {count} had{where}. Lower `lr`, or fix what "
                "`sbkit replay` names; the last checkpoint is from before."
            )

    def _write(self, step: Step, what: str) -> None:
        """Write down this rank's part; with a loss to blame, only the ranks that have it."""
        finite = [bool(seen.lost.isfinite()) for seen in step.seen]
        if self._folder is None or (what == "loss" and finite and all(finite)):
            return
        batches = [
            seen.described | {"loss_is_finite": good}
            for seen, good in zip(step.seen, finite, strict=True)
        ]
        place = {"epoch": self._epoch, "step": step.step, "rank": rank()}
        record = {"what": what, **place, "micro_batches": batches}
        folder = self._folder.parent.resolve() / FOLDER
        file = folder / f"step-{step.step}-rank-{rank()}.json"
        replay = replay_command(file) if self._keep(step, file.with_suffix(".pt")) else None
        with _reporting(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, to_json(record | {"replay": replay}, indent=1))

    def _keep(self, step: Step, file: Path) -> bool:
        """Save what a replay needs, unless the batches are of a kind that only a recipe knows."""
        plans = [self._plan(seen) for seen in step.seen]
        if not plans or None in plans:
            return False
        micro_batches = [
            {"ids": seen.described["ids"], "plan": plan, "random": seen.random}
            for seen, plan in zip(step.seen, plans, strict=True)
        ]
        saved = {"modules": self._modules.state_dict(), "micro_batches": micro_batches}
        with _reporting(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            _make_room(file.parent)
            with written_beside(file) as beside:
                torch.save(saved, beside)
            return True
        return False

    def _plan(self, seen: Record) -> list[list[Any]] | None:
        """Plan a micro-batch again: rows, samples, percent and weight of each of its examples."""
        if self._sampler is None or seen.place is None:
            return None
        epoch, number = seen.place
        planner = copy.copy(self._sampler)
        planner.set_epoch(epoch, start=number - 1)
        examples = next(iter(planner), None)
        if examples is None:
            return None
        return [[list(each.rows), *astuple(each)[1:]] for each in examples]


def _make_room(folder: Path) -> None:
    """Remove all but the newest of this rank's models, so that there are `KEPT` with the next."""
    models = folder.glob(f"step-*-rank-{rank()}.pt")
    old = sorted(models, key=lambda each: each.stat().st_mtime)[: 1 - KEPT]
    for file in old:
        file.unlink()


@contextmanager
def _reporting(file: Path) -> Iterator[None]:
    """Print that a file could not be written, and go on: the step is skipped anyway."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
        print(f"{file} could not be written ({error}); the run goes on.", file=sys.stderr)


def replay_command(file: Path) -> str:
    """Write the command that replays a batch, wherever it is given.

    It goes where the run was started, from where the YAML's relative paths lead.
    """
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['sbkit', 'replay', str(file)])}"


def ids_of(batch: Any) -> list[str]:
    """Name the utterances of a batch, sbkit's or SpeechBrain's; others may have none."""
    ids = batch.ids if isinstance(batch, Batch) else getattr(batch, "id", None)
    return [str(each) for each in ids] if isinstance(ids, list) else []


def describe(batch: Any) -> dict[str, Any]:
    """Name the utterances of a batch and their lengths, as far as its kind tells."""
    described: dict[str, Any] = {"ids": ids_of(batch)}
    if isinstance(batch, Batch):
        described["samples"] = batch.audio_lengths.tolist()
    if isinstance(batch, TextBatch):
        described["labels"] = batch.token_lengths.tolist()
    return described


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
