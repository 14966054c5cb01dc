"""What a run takes in memory, time and disk: its largest batch is run for real, and measured."""

import gc
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.allocator import return_freed_memory
from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing
from sbkit.check.dry_run import dry_run
from sbkit.check.finding import Finding
from sbkit.check.placement import count_processes
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.data.plan import MicroBatch
from sbkit.data.sampler import TrainSampler, split_batch
from sbkit.train.nonfinite import explained_memory
from sbkit.train.step import training_loss

NAME = "cost"
BESIDE_KEPT = 2  # checkpoints: the newest, and the one being written
KILOBYTE = 1024


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process of a run takes.

    peak_bytes: on a GPU the most that torch allocated, elsewhere the most that the process held.
    seconds_per_epoch: by the audio, as if validation took as long as training.
    """

    parameters: int
    trained: int  # of them, once nothing is frozen for a time
    steps_per_epoch: int
    peak_bytes: int
    seconds_of_step: float  # the one of the largest batch
    seconds_per_epoch: float
    seconds_of_run: float
    checkpoints: int
    checkpoint_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        """Write the figures for a person."""
        rows = [
            ("parameters", f"{self.parameters:,}, of which {self.trained:,} are trained"),
            ("steps per epoch", f"{self.steps_per_epoch:,}"),
            ("memory at its peak", _megabytes(self.peak_bytes)),
            ("seconds of the largest step", f"{self.seconds_of_step:,.2f}"),
            ("seconds per epoch", f"about {self.seconds_per_epoch:,.1f}, of the measured step"),
            ("hours of all epochs", f"about {self.seconds_of_run / 3600:,.2f}"),
            ("a checkpoint", _megabytes(self.checkpoint_bytes)),
            (f"disk of the run, {self.checkpoints} checkpoints", _megabytes(self.disk_bytes)),
        ]
        return "\n".join(f"{name:<36}{value}" for name, value in rows)


def check_cost(planned: PlannedRun) -> Iterator[Finding]:
    """Find a batch that does not fit into memory, and checkpoints that do not fit on the disk."""
    if planned.target is not None or dry_run(planned).broken:
        return  # nothing can be measured for another machine
    cost = planned.take(NAME, lambda: measure_cost(planned))
    files = (planned.run_folder / CHECKPOINTS).rglob("*")
    needed = cost.disk_bytes - sum(file.stat().st_size for file in files if file.is_file())
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


def measure_cost(planned: PlannedRun) -> Cost:
    """Train the largest batch; the time of the others follows by their audio.

    Raises SbkitError: a step fails on this device, or does not fit into memory.
    """
    plan, steps_per_epoch = _plan(planned)
    valid: Any = planned.make_loaders().valid.values()
    evaluated = [batch for each in valid for batch in each.batch_sampler]
    largest = max(plan, key=padded)
    with real_steps(planned) as steps:
        batch = steps.load(largest)
        with explained_memory(batch):
            steps.take(batch)  # which warms up
            step = steps.take(batch)
        audio = sum(map(padded, plan)) + sum(map(padded, evaluated)) / count_processes(planned)
        epoch = step * audio / padded(largest)
        checkpoints = int(planned.knobs.get("average_checkpoints", 1)) + BESIDE_KEPT
        return Cost(
            parameters=sum(each.numel() for each in planned.require_model().parameters()),
            trained=steps.trained,
            steps_per_epoch=steps_per_epoch,
            peak_bytes=steps.peak,
            seconds_of_step=round(step, 3),
            seconds_per_epoch=round(epoch, 2),
            seconds_of_run=round(epoch * planned.knobs["number_of_epochs"], 2),
            checkpoints=checkpoints,
            checkpoint_bytes=steps.saved_bytes,
            disk_bytes=checkpoints * steps.saved_bytes,
        )


class RealSteps:
    """Steps of a Brain with its optimizers: forward, backward, update."""

    def __init__(self, planned: PlannedRun) -> None:
        self.brain: Any = planned.build_again()
        self._beside = _tensor_bytes(planned.require_model())  # the plan's own weights
        self._loader: Any = planned.make_loaders().train
        self._accumulates = int(planned.knobs.get("grad_accumulation_factor", 1)) > 1
        self.brain.on_stage_start(Stage.TRAIN, 1)
        self.brain.init_optimizers()

    def load(self, batch: MicroBatch) -> Any:
        """Read a planned batch."""
        return self._loader.collate_fn(self._loader.dataset.__getitems__(batch))

    def take(self, batch: Any) -> float:
        """Take a step, and return its seconds.

        Raises SbkitError: a part or an optimizer fails on this device.
        """
        begun, brain = time.perf_counter(), self.brain
        if not self._accumulates:
            brain.modules.zero_grad(set_to_none=True)
        brain.training_step.train_mode()
        try:
            loss = training_loss(brain, batch.to(brain.device))
            torch.autograd.backward(loss.sums.sum())
            for optimizer in (brain.optimizers_dict or {}).values():
                optimizer.step()
        except (SbkitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a part or an optimizer raises on this device
            raise SbkitError(
                f"A step of training must run on {brain.device}, but raised {type(error).__name__} "
                f"({str(error).partition(chr(10))[0]}). Correct the part that it names; a tensor "
                "on another device must be a buffer of a module in `model`, or be moved."
            ) from error
        if brain.device.type != "cpu":
            torch.get_device_module(brain.device).synchronize()
        return time.perf_counter() - begun

    @property
    def peak(self) -> int:
        """Return the most bytes held so far, without what training holds only once."""
        if self.brain.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.brain.device)
        return KILOBYTE * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._beside

    @property
    def trained(self) -> int:
        """Count the parameters that learn."""
        parameters = self.brain.modules.parameters()
        return sum(each.numel() for each in parameters if each.requires_grad)

    @property
    def saved_bytes(self) -> int:
        """Count the bytes of a checkpoint: the model, its average, what the optimizers keep."""
        optimizers = (self.brain.optimizers_dict or {}).values()
        states = [state for each in optimizers for state in each.state.values()]
        kept = [value for each in states for value in each.values() if isinstance(value, Tensor)]
        kept += self.brain.training_step.moving_average.others.values()
        return _tensor_bytes(self.brain.modules) + sum(each.nbytes for each in kept)


@contextmanager
def real_steps(planned: PlannedRun) -> Iterator[RealSteps]:
    """Yield steps of a Brain of its own, on the device and in the precision of the run."""
    device = planned.choose_placement().device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    gc.collect()
    return_freed_memory()  # of the checks before, which would count
    with preserve_rng(device):
        steps = RealSteps(planned)
        try:
            yield steps
        finally:
            del steps.brain  # and its memory, which training needs
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()


def padded(batch: MicroBatch) -> int:
    """Count the samples of a batch with its padding."""
    return len(batch) * max(each.samples for each in batch)


def _plan(planned: PlannedRun) -> tuple[list[MicroBatch], int]:
    """Return the first epoch's micro-batches of the first process, and the number of its steps."""
    sampler = planned.make_loaders().train.batch_sampler
    if not isinstance(sampler, TrainSampler):
        raise MissingPartError(NAME)
    parts = count_processes(planned) * int(planned.knobs.get("grad_accumulation_factor", 1))
    steps = [split_batch(step, parts)[:: count_processes(planned)] for step in sampler.steps()]
    return [each for step in steps for each in step], len(steps)


def _tensor_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
