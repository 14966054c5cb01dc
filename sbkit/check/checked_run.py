"""The input of the checks: the YAML that is checked, the objects of its run, and a Brain to try."""

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed, printable
from sbkit.config.document import Keys
from sbkit.config.hparams import RunSpec
from sbkit.data.sampler import RankSampler
from sbkit.data.splits import read_column
from sbkit.distributed.device import ON_CPU, device_counter_for, parse_device
from sbkit.train.brain import Brain
from sbkit.train.setup import PreparedRun, RunData, choose_placement

# Times the loss before, or 1. The loss of hparams/ctc.yaml falls to 0.5 at its `lr` of 0.0025; at
# 10 times that rate it grows to 1.2, at 100 times to 6, at 1,000 times to 850.
MAX_LOSS_GROWTH = 10.0
MAX_LISTED_IDS = 5  # in a sentence; `--json` lists all
CPU_OPTIONS: dict[str, Any] = {
    "device": ON_CPU.device,
    "precision": "fp32",
    "eval_precision": "fp32",
    "grad_accumulation_factor": 1,
    "compile": False,
}

Rows = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what is declared and what would take effect.

    where: FILE:LINE, or "override of KEY".
    problem: a sentence without its period.
    fix: advice; empty if the problem includes it.
    stops: the run is not started (an error); otherwise the finding is a note.
    ids: the utterances concerned.

    >>> print(Finding(where="ctc.yaml:3", problem="`lr` is negative", fix="Raise it.", check="lr"))
    ctc.yaml:3: error: `lr` is negative [lr]
      fix: Raise it.
    """

    where: str
    problem: str
    fix: str = ""
    stops: bool = True
    ids: tuple[str, ...] = field(default=(), repr=False)
    check: str = ""

    @property
    def severity(self) -> str:
        return "error" if self.stops else "note"

    def __str__(self) -> str:
        line = printable(f"{self.where}: {self.severity}: {self.problem} [{self.check}]")
        return f"{line}\n  fix: {printable(self.fix)}" if self.fix else line

    def as_sentence(self) -> str:
        """Write the finding as one paragraph, with its place unless that is only the file."""
        text = f"{self.problem}. {self.fix}".rstrip()
        is_located = self.where in text or self.where.endswith(":1")
        return printable(text if is_located else f"{text} ({self.where})")


def finding_at(spec: RunSpec, *keys: str | int, **options: Any) -> Finding:
    """Make a finding at the line of a key."""
    return Finding(where=spec.place(*keys), **options)


def has_device(spec: RunSpec) -> bool:
    """Return whether this machine has the device and the precision of the run."""
    try:
        choose_placement(spec)
    except SbkitError:
        return False
    return spec.target is None


@dataclass
class DryRun:
    """The results of small steps of training.

    running: the modules whose `forward` is running, or has failed, outermost first.
    created: parts that `forward` made.
    unsaved: state that the steps changed, an evaluation needs, and no checkpoint holds.
    rate, rate_of: the highest rate of the first two steps, and the name of its optimizer.
    loss_before, loss_after: the summed loss of their batch; num_labels: its labels.
    """

    error: Exception | None = None  # what a part or a hook raised, if the steps broke off
    running: list[nn.Module] = field(default_factory=list)
    called: set[int] = field(default_factory=set)  # ids of modules
    trained: set[int] = field(default_factory=set)  # ids of parameters with a gradient
    zero: set[int] = field(default_factory=set)  # ids of those whose gradients are all zero
    created: list[Keys] = field(default_factory=list)
    unsaved: list[Keys] = field(default_factory=list)
    rate: float = 0.0
    rate_of: str = ""
    loss_before: Tensor = field(default_factory=lambda: torch.zeros(()))
    loss_after: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_labels: Tensor = field(default_factory=lambda: torch.ones(()))

    @property
    def explodes(self) -> bool:
        """Whether the two steps have multiplied the loss, or made it NaN."""
        growth = self.loss_after - self.loss_before
        largest = self.loss_before.abs().max(self.num_labels)
        return not bool(growth < MAX_LOSS_GROWTH * largest)

    def enter(self, module: nn.Module, inputs: object) -> None:
        self.running.append(module)
        self.called.add(id(module))

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        self.running.pop()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The time, the memory and the disk space of one process of a run.

    trainable_parameters: including those that `freeze` holds for a number of steps.
    peak_bytes: on a GPU the most that torch allocated, elsewhere the most the process held, in the
        largest steps and the largest batch of an evaluation. On the CPU a long run holds up to
        twice as much, because freed memory stays with the process in pieces.
    device_bytes: the memory of the GPU, elsewhere what the process could allocate.
    step_seconds: the time of a step with the largest batch.
    fp32_step_seconds: the same in fp32, if it fits, of a run with less precision on the CPU.
    epoch_seconds: an estimate by the audio, as if validation were as slow as training.
    num_checkpoints: the most that the run folder has at the same time.
    """

    parameters: int
    trainable_parameters: int
    steps_per_epoch: int
    peak_bytes: int
    device_bytes: int
    step_seconds: float
    fp32_step_seconds: float | None
    epoch_seconds: float
    run_seconds: float
    num_checkpoints: int
    checkpoint_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        rows = [
            ("parameters", f"{self.parameters:,}, {self.trainable_parameters:,} of them trainable"),
            ("steps per epoch", f"{self.steps_per_epoch:,}"),
            ("peak memory", f"{megabytes(self.peak_bytes)} of {megabytes(self.device_bytes)}"),
            ("seconds of the largest step", f"{self.step_seconds:,.2f}"),
            ("seconds per epoch", f"about {self.epoch_seconds:,.1f}, from the measured step"),
            ("hours of training", f"about {self.run_seconds / 3600:,.2f}"),
            ("size of a checkpoint", megabytes(self.checkpoint_bytes)),
            (f"disk space for {self.num_checkpoints} checkpoints", megabytes(self.disk_bytes)),
        ]
        return "\n".join(f"{name:<36}{value}" for name, value in rows)


def megabytes(count: float) -> str:
    """Write a number of bytes in MB."""
    return f"{count / 1e6:,.1f} MB"


@dataclass(kw_only=True)
class CheckedRun:
    """A run that is checked.

    data: the data and labels of the run, which the check leaves unchanged.
    copy: the run, built once more in a scratch folder.
    brain: a Brain of the copy's objects on the CPU, made like the run's.
    reached: every object within the objects and the Brain, before any step, with its path.
    highest_factor: the highest factor of the declared rate in the steps of the run.
    helpers: hashes of the frozen modules beside the model, before any step.
    learnable: ids of the model's parameters that require a gradient as they are built.
    dry_run: the results of small steps of the Brain.
    initial_weights, cost: found by checks, for `sbkit check` to print: lines about the weights that
        training starts from, and what was measured.
    """

    data: RunData
    copy: PreparedRun
    brain: Brain
    reached: Sequence[tuple[Keys, object]] = field(repr=False)
    highest_factor: float
    helpers: Mapping[str, str]
    learnable: Set[int] = field(repr=False)
    dry_run: DryRun
    initial_weights: list[str] = field(default_factory=list)
    cost: Cost | None = None

    @property
    def spec(self) -> RunSpec:
        return self.data.spec

    @property
    def optimizers(self) -> list[Optimizer]:
        return list((self.brain.optimizers_dict or {}).values())

    @property
    def model(self) -> nn.ModuleList:
        model: nn.ModuleList = self.copy.hparams["model"]
        return model

    @property
    def sampler(self) -> RankSampler | None:
        """The sampler of the training set; None if a recipe plans its batches in another way."""
        return planned_by(self.copy)

    @property
    def last_epoch(self) -> int:
        """The epoch whose plan is checked; in a curriculum, it has all utterances."""
        return last_epoch_of(self.copy)

    @property
    def num_steps(self) -> int:
        """The optimizer steps of the run."""
        return count_steps(self.copy)

    def rate_path(self, name: str) -> Keys:
        """Return the path of the rate of an optimizer, which the user may change.

        name: of one of `optimizers`, or `opt_class`.
        """
        parents = ("optimizers", name) if name in (self.spec.tree.get("optimizers") or ()) else ()
        return self.spec.source_of(*parents, "opt_class", "lr")

    @property
    def num_processes(self) -> int:
        """The number of torchrun's processes, or one for each device of the target."""
        target = self.spec.target
        if target is None:
            return int(os.environ.get("WORLD_SIZE", "1"))
        return max(1, device_counter_for(target)(parse_device(target).type))

    @property
    def accumulation(self) -> int:
        """The micro-batches of each process in a step."""
        return int(self.spec.settings["grad_accumulation_factor"])

    def finding(self, *keys: str | int, **options: Any) -> Finding:
        return finding_at(self.spec, *keys, **options)

    def note(self, *keys: str | int, **options: Any) -> Finding:
        return self.finding(*keys, stops=False, **options)


def finding_of_rows(
    run: CheckedRun, rows_by_split: Mapping[str, Rows], **options: Any
) -> Iterator[Finding]:
    """Make a finding of the utterances in some rows; the options are those of `finding_of_ids`."""
    splits = run.data.splits.named()
    ids = {n: read_column(splits[n].select(rows), "id") for n, rows in rows_by_split.items()}
    yield from finding_of_ids(run, ids, **options)


def finding_of_ids(
    run: CheckedRun,
    ids_by_split: Mapping[str, Sequence[str]],
    *,
    problem: str,
    fix: str,
    key: str = "data_folder",
    stops: bool = False,
) -> Iterator[Finding]:
    """Make a finding of utterances, if any; counts and ids are added to the problem."""
    splits = run.data.splits.named()
    ids_by_split = {name: ids for name, ids in ids_by_split.items() if ids}
    ids = [*chain(*ids_by_split.values())]
    if ids:
        counts = (f"{len(ids_by_split[n]):,} of {len(splits[n]):,} in {n}" for n in ids_by_split)
        problem = f"{problem}: {listed(counts)} ({listed(ids, max_names=MAX_LISTED_IDS)})"
        yield run.finding(key, problem=problem, fix=fix, stops=stops, ids=tuple(ids))


def planned_by(run: PreparedRun) -> RankSampler | None:
    """Return the sampler of the training set; None if a recipe plans its batches itself."""
    sampler = getattr(run.loaders.train, "batch_sampler", None)
    return sampler if isinstance(sampler, RankSampler) else None


def last_epoch_of(run: PreparedRun) -> int:
    """Return the number of the epoch after which a run ends."""
    return int(run.hparams["epoch_counter"].limit)


def count_steps(run: PreparedRun) -> int:
    """Return the optimizer steps of a run."""
    train, sampler = run.loaders.train, planned_by(run)
    accumulation = int(run.spec.settings["grad_accumulation_factor"])
    steps = sampler.steps() if sampler else range(0, len(train), accumulation)
    return max(1, len(steps)) * last_epoch_of(run)
