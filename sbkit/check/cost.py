"""What a run takes in memory, time and disk: its largest batches are run for real, and measured."""

import copy
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run, unchanged
from sbkit.check.model.ownership import optimizers_of
from sbkit.check.model.placement import count_processes
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.declaration import CHECKPOINTS
from sbkit.data.batches.plan import MicroBatch
from sbkit.data.batches.sampler import TrainSampler, split_batch
from sbkit.distributed.device import resolve
from sbkit.train.step import training_loss

NAME = "cost"
BESIDE_KEPT = 2  # checkpoints: the newest, and the one being written
PROCESS = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process of a run takes.

    peak_bytes: on a GPU the most that torch allocates, elsewhere the most that the process holds.
    What has to be measured is None when --target is another machine.
    """

    parameters: int
    steps_per_epoch: int
    padding: float  # share of the audio
    peak_bytes: int | None
    seconds_of_step: float | None  # the one of the largest batch
    seconds_per_epoch: float | None
    seconds_of_run: float | None
    checkpoints: int
    checkpoint_bytes: int | None


def check_cost(planned: PlannedRun) -> Iterator[Finding]:
    """Find a batch that does not fit into memory, and checkpoints that do not fit on the disk."""
    try:
        cost = measure_cost(planned)
    except torch.OutOfMemoryError as error:
        yield planned.finding(
            NAME,
            "batch_seconds",
            declared=f"a batch of {planned.knobs.get('batch_seconds')} s must fit into memory",
            effect=f"the largest does not ({str(error).partition('.')[0]})",
            fix="Raise --grad_accumulation_factor, lower --batch_seconds, or pass "
            "--batch_seconds=auto.",
        )
        return
    yield from _find_full_disk(planned, cost)


def measure_cost(planned: PlannedRun) -> Cost:
    """Run the largest batches, once, and return the cost of the run.

    Raises:
        MissingPartError: a step cannot be taken, which other checks report.
        torch.OutOfMemoryError: the largest batch does not fit.
    """
    if NAME not in planned.parts:
        if dry_run(planned).broken:
            raise MissingPartError(NAME)
        planned.parts[NAME] = _measure(planned)
    cost: Cost = planned.parts[NAME]
    return cost


def as_table(cost: Cost) -> str:
    """Write the figures for a person."""
    room = None if cost.checkpoint_bytes is None else cost.checkpoints * cost.checkpoint_bytes
    rows = [
        ("parameters", f"{cost.parameters:,}"),
        ("steps per epoch", f"{cost.steps_per_epoch:,}"),
        ("padding", f"{cost.padding:.1%} of the audio"),
        ("memory at its peak", _written(cost.peak_bytes, _megabytes)),
        ("seconds of the largest step", _written(cost.seconds_of_step, "{:,.2f}".format)),
        ("seconds per epoch", _written(cost.seconds_per_epoch, "{:,.1f}".format)),
        ("hours of the run", _written(cost.seconds_of_run, lambda s: f"{s / 3600:,.2f}")),
        ("a checkpoint", _written(cost.checkpoint_bytes, _megabytes)),
        (f"disk of the run, {cost.checkpoints} checkpoints", _written(room, _megabytes)),
    ]
    return "\n".join(f"{name:<36}{value}" for name, value in rows)


class RealSteps:
    """Steps of a Brain with its optimizers: forward, backward, update."""

    def __init__(self, brain: Any, loader: Any, *, accumulates: bool = False) -> None:
        self._brain, self._loader, self._accumulates = brain, loader, accumulates
        self._optimizers = optimizers_of(brain, copy.copy(brain.checkpointer))

    def take(self, batch: MicroBatch) -> float:
        """Take a step, and return its seconds, reading its audio included.

        Raises SbkitError: a part or an optimizer fails on this device.
        """
        begun = time.perf_counter()
        if not self._accumulates:
            self._brain.modules.zero_grad(set_to_none=True)
        self._brain.train_mode()
        device = self._brain.device
        try:
            loss = training_loss(self._brain, _collate(self._loader, batch).to(device))
            torch.autograd.backward(loss.sums.sum())
            for optimizer in self._optimizers:
                optimizer.step()
        except (SbkitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a part or an optimizer raises on this device
            raise SbkitError(
                f"A step of training must run on {device}, but raised {type(error).__name__} "
                f"({str(error).partition(chr(10))[0]}). Correct the part that it names; a tensor "
                "on another device must be a buffer of a module in `model`, or be moved."
            ) from error
        return _seconds_since(begun, self._brain.device)

    @property
    def saved_bytes(self) -> int:
        """Count the bytes of a checkpoint: the model, and what the optimizers keep."""
        modules = self._brain.modules
        return bytes_of([*modules.parameters(), *modules.buffers(), *_states(self._optimizers)])


@contextmanager
def brain_in_place(planned: PlannedRun) -> Iterator[Any]:
    """Yield a Brain on the device and in the precision of the run; afterwards it is as it was."""
    here = resolve("cpu", "fp32")
    is_here = planned.placement == here
    brain = planned.brain if is_here else planned.make_brain(planned.placement)
    parameters = [(each, each.detach().to("cpu", copy=True)) for each in brain.modules.parameters()]
    try:
        with unchanged(brain.modules, brain.device):
            yield brain
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        if not is_here:
            planned.make_brain(here)
        if planned.placement.device.type == "cuda":
            torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> int:
    """Measure the peak of memory from now on; return what is held already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # of another system, or of a container that forbids it
        (PROCESS / "clear_refs").write_text("5")  # resets VmHWM
    return _of_process("VmRSS") or 0


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes held since `reset_peak`; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _of_process("VmHWM")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors."""
    return sum(each.nbytes for each in tensors)


def padded(batch: MicroBatch) -> int:
    """Count the samples of a batch with its padding."""
    return len(batch) * max(each.samples for each in batch)


def _measure(planned: PlannedRun) -> Cost:
    plan, accumulation = _plan(planned)
    epochs = planned.knobs.get("number_of_epochs")
    measured: dict[str, Any] = dict.fromkeys(
        ("peak_bytes", "seconds_of_step", "seconds_per_epoch", "checkpoint_bytes")
    )
    if planned.target is None:
        with brain_in_place(planned) as brain:
            measured = _run_largest(planned, brain, plan, accumulation)
    epoch = measured["seconds_per_epoch"]
    return Cost(
        parameters=sum(each.numel() for each in planned.brain.modules.parameters()),
        steps_per_epoch=len(plan) // accumulation,
        padding=round(1 - _samples(plan) / sum(map(padded, plan)), 4),
        seconds_of_run=round(epochs * epoch, 2) if epoch and epochs else None,
        checkpoints=int(planned.knobs.get("average_checkpoints", 1)) + BESIDE_KEPT,
        **measured,
    )


def _run_largest(
    planned: PlannedRun, brain: Any, plan: Sequence[MicroBatch], accumulation: int
) -> dict[str, Any]:
    """Train and evaluate the largest batch; the time of the others follows by their audio."""
    loaders, device = planned.loaders, brain.device
    steps = RealSteps(brain, loaders.train, accumulates=accumulation > 1)
    largest = max(plan, key=padded)
    reset_peak(device)
    steps.take(largest)  # which warms up
    step = steps.take(largest)
    seconds = step * sum(map(padded, plan)) / padded(largest)
    brain.modules.zero_grad(set_to_none=True)
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    evaluated = [(each, batch) for each in loaders.valid.values() for batch in each.batch_sampler]
    loader, batch = max(evaluated, key=lambda each: padded(each[1]))
    begun = time.perf_counter()
    brain.evaluate_batch(_collate(loader, batch), Stage.VALID)
    share = sum(padded(each) for _, each in evaluated) / padded(batch) / count_processes(planned)
    seconds += _seconds_since(begun, device) * share
    return {
        "peak_bytes": peak_memory(device),
        "seconds_of_step": round(step, 3),
        "seconds_per_epoch": round(seconds, 2),
        "checkpoint_bytes": steps.saved_bytes,
    }


def _plan(planned: PlannedRun) -> tuple[list[MicroBatch], int]:
    """Return the first epoch's micro-batches of the first process, and how many make a step."""
    sampler = planned.loaders.train.batch_sampler
    if not isinstance(sampler, TrainSampler):
        raise MissingPartError(NAME)
    accumulation = int(planned.knobs.get("grad_accumulation_factor", 1))
    processes = count_processes(planned)
    shares = (split_batch(step, processes * accumulation)[::processes] for step in sampler.steps())
    return [each for share in shares for each in share], accumulation


def _find_full_disk(planned: PlannedRun, cost: Cost) -> Iterator[Finding]:
    if planned.run_folder is None or cost.checkpoint_bytes is None:
        return
    files = (planned.run_folder / CHECKPOINTS).rglob("*")
    there = sum(file.stat().st_size for file in files if file.is_file())
    needed = cost.checkpoints * cost.checkpoint_bytes - there
    free = shutil.disk_usage(nearest_existing(planned.run_folder)).free
    if needed > free:
        yield planned.finding(
            NAME,
            "output_folder",
            declared=f"{planned.run_folder} must have room for {cost.checkpoints:,} checkpoints of "
            f"{_megabytes(cost.checkpoint_bytes)}",
            effect=f"they need {_megabytes(needed)} more, and {_megabytes(free)} are free there: "
            "the run would end with a full disk",
            fix="Choose an --output_folder with room, or lower --average_checkpoints.",
        )


def _collate(loader: Any, batch: MicroBatch) -> Any:
    return loader.collate_fn(loader.dataset.__getitems__(batch))


def _seconds_since(begun: float, device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - begun


def _states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))


def _samples(plan: Iterable[MicroBatch]) -> int:
    return sum(each.samples for batch in plan for each in batch)


def _of_process(name: str) -> int | None:
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def _written(value: float | None, write: Any) -> str:
    return "not measured" if value is None else str(write(value))
