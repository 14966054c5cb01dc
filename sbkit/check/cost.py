"""Memory, time and disk of a run, measured by real steps on its device.

`batch_seconds: auto` is the largest batch whose step fits into memory, tried on the GPU.
"""

import gc
import logging
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.allocator import return_freed_memory
from sbkit.base.errors import ConfigError, DeviceError, SbkitError
from sbkit.base.files import nearest_existing
from sbkit.base.units import at_speed, samples_to_seconds
from sbkit.check.dry_run import completed_dry_run
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.checkpoint.run_config import CHECKPOINTS, read_run_config
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import Batch, UtteranceDataset
from sbkit.data.sampler import Example, MicroBatch, split_batch, to_percents
from sbkit.data.splits import sample_counts
from sbkit.distributed.ranks import gather_over_ranks, main_rank_first, single_rank, world_size
from sbkit.logs.handlers import quiet
from sbkit.train.brain import training_loss
from sbkit.train.nonfinite import explained_memory
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

COST = "cost"  # among a planned run's results
EXTRA_CHECKPOINTS = 2  # besides those to average: the newest, and the one being written
KILOBYTE = 1024

AUTO, BATCH_SECONDS = "auto", "batch_seconds"
PROBED_SECONDS = 3600.0  # `batch_seconds` of the plan that is probed; only its data is used
MEMORY_SHARE = 0.9  # free memory for a step: the allocator has gaps, and others allocate
MIN_GROWTH = 1.1  # a batch must be this much larger than the largest that fits to be tried
CPU_SECONDS = 60  # audio: 98 s are trained per second at 35, 104 at 60, 102 at 120, 65 at 240
MIN_AUTO_STEPS = 20  # in an epoch, with `batch_seconds: auto`


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process of a run takes.

    Attributes:
        trained: parameters that learn, also if frozen for a time.
        peak_bytes: on a GPU the most that torch allocated, elsewhere the most the process held.
        seconds_of_step: the time of the largest batch.
        seconds_per_epoch: in proportion to the audio, as if validation took as long as training.
    """

    parameters: int
    trained: int
    steps_per_epoch: int
    peak_bytes: int
    seconds_of_step: float
    seconds_per_epoch: float
    seconds_of_run: float
    checkpoints: int
    checkpoint_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        rows = [
            ("parameters", f"{self.parameters:,}, {self.trained:,} of them trained"),
            ("steps per epoch", f"{self.steps_per_epoch:,}"),
            ("memory at its peak", _megabytes(self.peak_bytes)),
            ("seconds of the largest step", f"{self.seconds_of_step:,.2f}"),
            ("seconds per epoch", f"about {self.seconds_per_epoch:,.1f}, from the measured step"),
            ("hours of all epochs", f"about {self.seconds_of_run / 3600:,.2f}"),
            ("a checkpoint", _megabytes(self.checkpoint_bytes)),
            (f"disk of the run, {self.checkpoints} checkpoints", _megabytes(self.disk_bytes)),
        ]
        return "\n".join(f"{name:<36}{value}" for name, value in rows)


def check_cost(planned: PlannedRun) -> Iterator[Finding]:
    """Find a batch that does not fit into memory, and checkpoints that do not fit on the disk."""
    if planned.target is not None:
        return  # nothing can be measured for another machine
    completed_dry_run(planned)
    cost, folder = planned.take(COST, lambda: measure_cost(planned)), planned.run_folder
    files = [file for file in (folder / CHECKPOINTS).rglob("*") if file.is_file()]
    needed = cost.disk_bytes - sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed > free:
        yield planned.finding(
            "output_folder",
            problem=f"{cost.checkpoints:,} checkpoints of {_megabytes(cost.checkpoint_bytes)} need "
            f"{_megabytes(needed)} more in {folder}, where {_megabytes(free)} are free: the run "
            "would end with a full disk",
            fix="Choose an --output_folder with room, or lower --average_checkpoints.",
        )


def measure_cost(planned: PlannedRun) -> Cost:
    """Train the largest batch, and estimate the time of the others from their audio."""
    num_processes = planned.count_processes()
    micro_batches_per_step = num_processes * planned.accumulation
    steps_of_epoch = planned.require_sampler().steps()
    plan = [  # of the first process
        batch
        for step in steps_of_epoch
        for batch in split_batch(step, micro_batches_per_step)[::num_processes]
    ]
    samplers = [loader.batch_sampler for loader in planned.make_loaders().valid.values()]
    evaluated = [batch for sampler in samplers for batch in sampler or ()]
    largest = max(plan, key=padded_samples)
    with real_steps(planned) as steps:
        batch = steps.load(largest)
        with explained_memory(batch):
            steps.take(batch)  # warm-up
            seconds = steps.take(batch)
        samples = sum(map(padded_samples, plan))
        samples_per_process = samples + sum(map(padded_samples, evaluated)) / num_processes
        epoch = seconds * samples_per_process / padded_samples(largest)
        parameters = list(steps.brain.modules.parameters())
        checkpoints = int(planned.knobs.get("average_checkpoints", 1)) + EXTRA_CHECKPOINTS
        return Cost(
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            steps_per_epoch=len(steps_of_epoch),
            peak_bytes=steps.peak_bytes,
            seconds_of_step=round(seconds, 3),
            seconds_per_epoch=round(epoch, 2),
            seconds_of_run=round(epoch * planned.knobs["number_of_epochs"], 2),
            checkpoints=checkpoints,
            checkpoint_bytes=steps.saved_bytes,
            disk_bytes=checkpoints * steps.saved_bytes,
        )


class RealSteps:
    """Steps of a Brain with its optimizers: forward, backward, update."""

    def __init__(self, planned: PlannedRun) -> None:
        self.brain = planned.build_again()
        self._check_bytes = _tensor_bytes(planned.require_model())  # training has no second model
        self._loader = planned.make_loaders().train
        self._accumulates = planned.accumulation > 1
        self.brain.on_stage_start(Stage.TRAIN, 1)
        self.brain.init_optimizers()

    def load(self, planned: MicroBatch) -> Batch:
        dataset = cast(UtteranceDataset, self._loader.dataset)
        return cast(Batch, self._loader.collate_fn(dataset.__getitems__(planned)))

    def take(self, batch: Batch) -> float:
        """Take a step, and return its seconds."""
        start, brain = time.perf_counter(), self.brain
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
            reason = str(error).partition("\n")[0]
            raise DeviceError(
                f"A step of training on {brain.device} raised {type(error).__name__} ({reason}). "
                "Correct the part that it names. A tensor on another device should be a buffer of "
                "a module in `model`, or be moved."
            ) from error
        if brain.device.type != "cpu":
            torch.get_device_module(brain.device).synchronize()
        return time.perf_counter() - start

    @property
    def peak_bytes(self) -> int:
        """The most bytes held so far, without the model of the check."""
        if self.brain.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.brain.device)
        held = KILOBYTE * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return held - self._check_bytes

    @property
    def saved_bytes(self) -> int:
        """The bytes of a checkpoint: the model, its average, and the states of the optimizers."""
        optimizers = (self.brain.optimizers_dict or {}).values()
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        tensors += self.brain.training_step.moving_average.shadow.values()
        return _tensor_bytes(self.brain.modules) + sum(t.nbytes for t in tensors)


@contextmanager
def real_steps(planned: PlannedRun) -> Iterator[RealSteps]:
    """Yield steps of a new Brain, on the device and in the precision of the run."""
    device = planned.choose_placement().device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    gc.collect()
    return_freed_memory()  # memory that earlier checks have freed would count
    with preserve_rng(device):
        steps = RealSteps(planned)
        try:
            yield steps
        finally:
            del steps.brain  # and its memory, which training needs
            gc.collect()
            torch.cuda.empty_cache()  # without CUDA it does nothing


def padded_samples(batch: MicroBatch) -> int:
    """Count the samples of a batch with its padding."""
    return len(batch) * max(example.samples for example in batch)


def _tensor_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


# -- batch_seconds: auto ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FittingBatch:
    """The padded audio of a process's micro-batch in seconds, and why it is not larger."""

    seconds: int
    reason: str


def find_batch_seconds(
    yaml_file: Path,
    overrides: Mapping[str, object],
    *,
    recipe: Recipe | None = None,
    target: str | None = None,
) -> dict[str, object]:
    """Return the overrides, with a number for `batch_seconds: auto`.

    A resumed run keeps the number that it started with. All ranks call this, and agree.
    """
    knobs = read_knobs(yaml_file, overrides)
    if knobs.get(BATCH_SECONDS) != AUTO:
        return dict(overrides)
    if target is not None:
        raise ConfigError(
            f"`{BATCH_SECONDS}: {AUTO}` is tried on this machine, but --target names another one. "
            f"Pass --{BATCH_SECONDS}=NUMBER."
        )
    run = Run(yaml_file, overrides, recipe=recipe)
    overrides = run.overrides
    run.check_ranges()
    if run.has_checkpoint():
        before = float(read_run_config(run.folder).values[BATCH_SECONDS])
        logger.info(f"{BATCH_SECONDS}: {AUTO} -> {before:g}, as the run started")
        return {**overrides, BATCH_SECONDS: before}
    micro_batches_per_step = world_size() * int(knobs.get("grad_accumulation_factor", 1))
    with main_rank_first(), single_rank(), quiet():
        probed_seconds = max(PROBED_SECONDS, float(knobs.get("max_seconds") or 0))
        with PlannedRun(
            yaml_file, {**overrides, BATCH_SECONDS: probed_seconds}, recipe=recipe
        ) as planned:
            try:
                fitting = _find_fitting(planned, micro_batches_per_step)
            except MissingPartError:  # the checks report the reason
                reason = "no step can be tried: see the errors of `sbkit check`"
                fitting = FittingBatch(CPU_SECONDS, reason)
    fitting = min(gather_over_ranks(fitting), key=lambda batch: batch.seconds)
    seconds = float(micro_batches_per_step * fitting.seconds)
    logger.info(f"{BATCH_SECONDS}: {AUTO} -> {seconds:g} ({fitting.reason})")
    return {**overrides, BATCH_SECONDS: seconds}


def _find_fitting(planned: PlannedRun, micro_batches_per_step: int) -> FittingBatch:
    """Find the largest micro-batch of a process."""
    device, batches = planned.choose_placement().device, ProbeBatches(planned)
    max_seconds = batches.total_seconds / MIN_AUTO_STEPS / micro_batches_per_step
    if device.type == "cpu":
        seconds = max(math.ceil(batches.longest_seconds), min(CPU_SECONDS, int(max_seconds)))
        return FittingBatch(seconds, "more is not faster on the CPU")
    if device.type != "cuda":
        raise DeviceError(
            f"`{BATCH_SECONDS}: {AUTO}` cannot be tried on {device}, whose free memory is not "
            f"known. Pass --{BATCH_SECONDS}=NUMBER."
        )
    free = torch.cuda.mem_get_info(device)[0]
    return try_steps(planned, batches, max_seconds=max_seconds, free_bytes=free)


def try_steps(
    planned: PlannedRun, batches: "ProbeBatches", *, max_seconds: float, free_bytes: int
) -> FittingBatch:
    """Find the largest batch whose real steps fit into the free bytes.

    Raises MissingPartError if a step fails on any device.
    """
    completed_dry_run(planned)
    with real_steps(planned) as steps:

        def peak_of(seconds: int) -> int | None:
            try:
                for batch in batches.of(seconds):
                    steps.take(steps.load(batch))
            except torch.OutOfMemoryError:
                return None
            return steps.peak_bytes

        fitting = largest_fitting(
            peak_of,
            min_seconds=math.ceil(batches.longest_seconds),
            max_seconds=max_seconds,
            free_bytes=free_bytes,
        )
    if fitting is None:
        raise DeviceError(
            f"A step with only the longest utterance ({batches.longest_seconds:.1f} s) does not "
            f"fit into {_gib(MEMORY_SHARE * free_bytes)} GiB. Lower --max_seconds, take a smaller "
            "model, or set --precision=bf16 if the device has it."
        )
    return fitting


def largest_fitting(
    peak_of: Callable[[int], int | None], *, min_seconds: int, max_seconds: float, free_bytes: int
) -> FittingBatch | None:
    """Raise the seconds of a batch while its step fits; None if not even the smallest one does.

    peak_of: from the seconds of a batch to the bytes of its step, None if it does not fit.
    """
    room, seconds, fitting = int(MEMORY_SHARE * free_bytes), min_seconds, None
    while (peak := peak_of(seconds)) is not None and peak <= room:
        fitting = FittingBatch(seconds, f"peak {_gib(peak)} of {_gib(free_bytes)} GiB")
        larger = int(min(max_seconds, 2 * seconds, seconds * room / max(peak, 1)))
        if larger < MIN_GROWTH * seconds:
            break
        seconds = larger
    return fitting


class ProbeBatches:
    """Batches of the longest and the median utterances of a planned run, at the lowest speed."""

    def __init__(self, planned: PlannedRun) -> None:
        samples = sample_counts(planned.prepare_splits().train)
        self._percent = min(100, *to_percents(planned.knobs.get("speeds", [1.0])))
        self._samples = at_speed(samples, self._percent)  # (N,) of each row
        self._order = np.argsort(samples, kind="stable")
        self._rate = int(planned.knobs["sample_rate"])
        self.longest_seconds = samples_to_seconds(int(self._samples.max()), self._rate)
        self.total_seconds = samples_to_seconds(int(samples.sum()), self._rate)

    def of(self, seconds: int) -> list[MicroBatch]:
        """Fill a batch with the longest utterances, and one with utterances of median length."""
        batches = []
        for end in (len(self._order), len(self._order) // 2 + 1):
            order = self._order[:end][::-1]
            count = max(1, seconds * self._rate // max(int(self._samples[order[0]]), 1))
            rows = np.resize(order[:count], count).tolist()
            batches.append([Example((r,), int(self._samples[r]), self._percent) for r in rows])
        return batches


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
