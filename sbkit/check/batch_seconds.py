"""`batch_seconds: auto`: find the largest batch whose training step fits into a GPU's memory."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sbkit.base.errors import ConfigError, DeviceError
from sbkit.base.units import at_speed, samples_to_seconds
from sbkit.check.cost import real_steps
from sbkit.check.dry_run import completed_dry_run
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.run_config import read_run_config
from sbkit.config.hparams import read_knobs
from sbkit.data.mix import samples_per_epoch
from sbkit.data.sampler import Example, MicroBatch, to_percents
from sbkit.data.splits import sample_counts
from sbkit.distributed.ranks import gather_over_ranks, main_rank_first, single_rank, world_size
from sbkit.logs.handlers import quiet
from sbkit.train.recipe import Recipe
from sbkit.train.setup import RunSetup

logger = logging.getLogger(__name__)

AUTO, BATCH_SECONDS = "auto", "batch_seconds"
PROBED_SECONDS = 3600.0  # a number instead of `auto` until it is found; no batch is planned with it
MEMORY_SHARE = 0.9  # of the free memory for a step: the allocator has gaps, and others allocate
MIN_GROWTH = 1.1  # the search ends when the next batch would be less than this times larger
# Seconds of audio in a micro-batch on the CPU. At 35, 60, 120 and 240 s, training took 98, 104, 102
# and 65 s of audio per second.
CPU_SECONDS = 60
MIN_AUTO_STEPS = 20  # in an epoch, with `batch_seconds: auto`


@dataclass(frozen=True)
class FittingBatch:
    """The largest micro-batch of a process that fits into memory.

    seconds: of its audio with the padding.
    reason: why it is not larger.
    """

    seconds: int
    reason: str


def find_batch_seconds(
    yaml_file: Path,
    overrides: Mapping[str, object],
    *,
    recipe: Recipe | None = None,
    target: str | None = None,
    run: RunSetup | None = None,
) -> dict[str, object]:
    """Return the overrides, with a number for `batch_seconds: auto`.

    A resumed run keeps the number that it started with. All ranks must call this function, and
    all get the same number: the lowest of their own.

    run: the run that follows, which takes over what is prepared here.
    """
    knobs = read_knobs(yaml_file, overrides)
    if knobs.get(BATCH_SECONDS) != AUTO:
        return dict(overrides)
    if target is not None:
        raise ConfigError(
            f"`{BATCH_SECONDS}: {AUTO}` is found by trying steps on this machine, but --target "
            f"names another machine. Set `{BATCH_SECONDS}` to a number."
        )
    setup = RunSetup(yaml_file, overrides, recipe=recipe)
    overrides = setup.overrides
    setup.check_ranges()
    if setup.has_checkpoint():
        saved_batch_seconds = float(read_run_config(setup.folder).values[BATCH_SECONDS])
        logger.info(f"{BATCH_SECONDS}: {AUTO} -> {saved_batch_seconds:g}, as the run started")
        return {**overrides, BATCH_SECONDS: saved_batch_seconds}
    micro_batches_per_step = world_size() * int(knobs.get("grad_accumulation_factor", 1))
    probed_seconds = max(PROBED_SECONDS, float(knobs.get("max_seconds") or 0))
    probed_overrides = {**overrides, BATCH_SECONDS: probed_seconds}
    with (
        main_rank_first(),
        single_rank(),
        PlannedRun(yaml_file, probed_overrides, recipe=recipe, run=run) as planned,
    ):
        try:
            fitting = _find_fitting(planned, micro_batches_per_step)
        except MissingPartError:  # the checks report the reason
            reason = "no step can run: see the errors of `sbkit check`"
            fitting = FittingBatch(CPU_SECONDS, reason)
        planned.hand_over()
    fitting = min(gather_over_ranks(fitting), key=lambda batch: batch.seconds)
    seconds = float(micro_batches_per_step * fitting.seconds)
    logger.info(f"{BATCH_SECONDS}: {AUTO} -> {seconds:g} ({fitting.reason})")
    return {**overrides, BATCH_SECONDS: seconds}


def _find_fitting(planned: PlannedRun, micro_batches_per_step: int) -> FittingBatch:
    """Find the largest micro-batch of a process; raises MissingPartError if no step can run."""
    device = planned.choose_placement().device
    batches = ProbeBatches(planned)
    max_seconds = batches.epoch_seconds / MIN_AUTO_STEPS / micro_batches_per_step
    if device.type == "cpu":
        seconds = max(math.ceil(batches.longest_seconds), min(CPU_SECONDS, int(max_seconds)))
        return FittingBatch(seconds, "a larger batch is not faster on the CPU")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return find_fitting_on_gpu(planned, batches, max_seconds=max_seconds, free_bytes=free_bytes)


def find_fitting_on_gpu(
    planned: PlannedRun, batches: "ProbeBatches", *, max_seconds: float, free_bytes: int
) -> FittingBatch:
    """Find the largest batch whose real steps fit into the free bytes.

    Raises MissingPartError if the dry run fails, since a step then fails on any device.
    """
    planned.prepare_labels()  # logged, unlike the steps
    completed_dry_run(planned)
    with quiet(), real_steps(planned) as steps:

        def peak_of(seconds: int) -> int | None:
            steps.reset_peak()
            try:
                for micro_batch in batches.batches_of(seconds):
                    steps.run_step(steps.load(micro_batch))
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
            f"fit into {_gib(MEMORY_SHARE * free_bytes)} GiB. Lower `max_seconds`, take a smaller "
            "model, or set `precision: bf16` if the device has it."
        )
    return fitting


def largest_fitting(
    peak_of: Callable[[int], int | None], *, min_seconds: int, max_seconds: float, free_bytes: int
) -> FittingBatch | None:
    """Find the largest batch whose step fits, to within MIN_GROWTH; None if no batch fits.

    peak_of: from the seconds of a batch to the peak bytes of its step, or None if it runs out of
        memory.

    The batch grows until a step does not fit. Then the gap between the largest that fits and the
    smallest that does not is halved.
    """
    max_bytes = int(MEMORY_SHARE * free_bytes)
    fitting: FittingBatch | None = None
    failed_seconds: int | None = None
    seconds = min_seconds
    while fitting is None or seconds >= MIN_GROWTH * fitting.seconds:
        peak = peak_of(seconds)
        if peak is not None and peak <= max_bytes:
            fitting = FittingBatch(seconds, f"peak {_gib(peak)} of {_gib(free_bytes)} GiB")
            seconds_by_memory = seconds * max_bytes / max(peak, 1)
            seconds = int(min(max_seconds, 2 * seconds, seconds_by_memory))
        elif fitting is None:
            return None
        else:
            failed_seconds = seconds
        if failed_seconds is not None:
            seconds = (fitting.seconds + failed_seconds) // 2
    return fitting


class ProbeBatches:
    """Micro-batches that probe the memory: utterances of a planned run, slowed down.

    Speed perturbation makes an utterance longest at the lowest of the run's speeds.
    """

    def __init__(self, planned: PlannedRun) -> None:
        splits = planned.prepare_splits()
        samples = sample_counts(splits.train)
        self._percent = min(100, *to_percents(planned.knobs.get("speeds", [1.0])))
        self._samples = at_speed(samples, self._percent)  # (N,) of each row
        self._longest_first = np.argsort(samples, kind="stable")[::-1]
        self._rate = int(planned.knobs["sample_rate"])
        self.longest_seconds = samples_to_seconds(int(self._samples.max()), self._rate)
        self.epoch_seconds = samples_to_seconds(samples_per_epoch(splits), self._rate)

    def batches_of(self, seconds: int) -> list[MicroBatch]:
        """Fill a batch with the longest utterances, and one with utterances of median length."""
        median = (len(self._longest_first) - 1) // 2
        return [
            self._fill(self._longest_first, seconds),
            self._fill(self._longest_first[median:], seconds),
        ]

    def _fill(self, rows: npt.NDArray[np.int64], seconds: int) -> MicroBatch:
        """Take rows, longest first, and repeat them if there are too few."""
        padded_samples = max(1, int(self._samples[rows[0]]))
        num_rows = max(1, seconds * self._rate // padded_samples)
        return [
            Example((row,), int(self._samples[row]), self._percent)
            for row in np.resize(rows[:num_rows], num_rows).tolist()
        ]


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
