"""`batch_seconds: auto`: the largest batch whose step fits into memory, tried on the GPU."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.base.errors import SbkitError
from sbkit.base.units import at_speed, samples_to_seconds
from sbkit.check.cost import real_steps
from sbkit.check.dry_run import dry_run
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.run_config import read_run_config
from sbkit.config.hparams import read_knobs
from sbkit.data.plan import Example, MicroBatch
from sbkit.data.sampler import to_percents
from sbkit.data.splits import sample_counts
from sbkit.distributed.ranks import gather_over_ranks, main_rank_first, single_rank, world_size
from sbkit.logs.handlers import quiet
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

AUTO, KNOB = "auto", "batch_seconds"
PROBED = 3600.0  # seconds of a plan of which only the data is used
MARGIN = 0.9  # of the free memory that a step may take: the allocator's gaps, other processes
WORTH_TRYING = 1.1  # times what fits already
ON_CPU = 60  # seconds; 98 seconds of audio a second at 35, 104 at 60, 102 at 120, 65 at 240
LEAST_STEPS = 20  # of an epoch
UNTRIED = "no step can be tried: see the errors of `sbkit check`"


@dataclass(frozen=True)
class FittingBatch:
    """The padded audio of one process's micro-batch, in seconds, and why it is not larger."""

    seconds: int
    reason: str


def find_batch_seconds(
    yaml_file: Path,
    overrides: Mapping[str, object],
    *,
    recipe: Recipe | None = None,
    target: str | None = None,
) -> dict[str, object]:
    """Return the overrides with a number for `batch_seconds: auto`; others as they are.

    A run that goes on keeps the number that it began with. All ranks call this, and agree.

    Raises SbkitError: another machine is meant, or not even the longest utterance fits.
    """
    knobs = read_knobs(yaml_file, overrides)
    if knobs.get(KNOB) != AUTO:
        return dict(overrides)
    if target is not None:
        raise SbkitError(
            f"`{KNOB}` must be a number where --target is another machine, but is {AUTO}, which is "
            f"tried on this one. Pass --{KNOB}=NUMBER."
        )
    run = Run(yaml_file, overrides, recipe=recipe)
    overrides = run.overrides
    run.check_ranges()
    if run.has_checkpoint():
        before = float(read_run_config(run.folder).values[KNOB])
        logger.info(f"{KNOB}: {AUTO} -> {before:g}, as the run began")
        return {**overrides, KNOB: before}
    with main_rank_first(), single_rank(), quiet():
        probing = {**overrides, KNOB: max(PROBED, float(knobs.get("max_seconds") or 0))}
        with PlannedRun(yaml_file, probing, recipe=recipe) as planned:
            try:
                found = _find(planned, parts := world_size() * _accumulation(knobs))
            except MissingPartError:  # which the checks report
                found = FittingBatch(ON_CPU, UNTRIED)
    found = min(gather_over_ranks(found), key=lambda each: each.seconds)
    seconds = float(parts * found.seconds)
    logger.info(f"{KNOB}: {AUTO} -> {seconds:g} ({found.reason})")
    return {**overrides, KNOB: seconds}


def largest_fitting(
    peak_of: Callable[[int], int | None], *, least: int, most: float, free: int
) -> FittingBatch | None:
    """Raise the seconds of a batch while its step fits; None where not even the least one does.

    peak_of: the bytes of a step of so many seconds, None where it does not fit.
    """
    room, seconds, found = int(MARGIN * free), least, None
    while (peak := peak_of(seconds)) is not None and peak <= room:
        found = FittingBatch(seconds, f"peak {_gib(peak)} of {_gib(free)} GiB")
        larger = int(min(most, 2 * seconds, seconds * room / max(peak, 1)))
        if larger < WORTH_TRYING * seconds:
            break
        seconds = larger
    return found


def _find(planned: PlannedRun, parts: int) -> FittingBatch:
    """Find the largest batch of one process, before it has put anything on its device.

    parts: micro-batches of a step. Raises MissingPartError where the run cannot be built.
    """
    device, batches = planned.choose_placement().device, Batches(planned)
    most = batches.total / LEAST_STEPS / parts
    if device.type == "cpu":
        seconds = max(math.ceil(batches.longest), min(ON_CPU, int(most)))
        return FittingBatch(seconds, "more is not faster on the CPU")
    if device.type != "cuda":
        raise SbkitError(
            f"`{KNOB}` must be a number where the free memory is not known, but is {AUTO} on "
            f"{device}. Pass --{KNOB}=NUMBER."
        )
    return try_steps(planned, batches, most=most, free=torch.cuda.mem_get_info(device)[0])


def try_steps(planned: PlannedRun, batches: "Batches", *, most: float, free: int) -> FittingBatch:
    """Find the largest batch whose real steps fit into the free bytes.

    Raises MissingPartError: a step fails anywhere.
    """
    if dry_run(planned).broken:
        raise MissingPartError(KNOB)
    with real_steps(planned) as steps:

        def peak_of(seconds: int) -> int | None:
            try:
                for batch in batches.of(seconds):
                    steps.take(steps.load(batch))
            except torch.OutOfMemoryError:
                return None
            return steps.peak

        least = math.ceil(batches.longest)
        found = largest_fitting(peak_of, least=least, most=most, free=free)
    if found is None:
        raise SbkitError(
            f"`{KNOB}` must be at least the longest utterance ({batches.longest:.1f} s), but a "
            f"step of it alone does not fit into {_gib(MARGIN * free)} GiB. Lower --max_seconds, "
            "take a smaller model, or set --precision=bf16 where the device has it."
        )
    return found


class Batches:
    """Batches of the longest and of the usual utterances of a planned run, as slow as they come."""

    def __init__(self, planned: PlannedRun) -> None:
        self._percent = min(100, *to_percents(planned.knobs.get("speeds", [1.0])))
        self._rows = sample_counts(planned.prepare_splits().train)
        self._order = np.argsort(self._rows, kind="stable")
        self._rate = int(planned.knobs["sample_rate"])
        self.longest = samples_to_seconds(self._samples(self._order[-1]), self._rate)
        self.total = samples_to_seconds(int(self._rows.sum()), self._rate)

    def of(self, seconds: int) -> list[MicroBatch]:
        """Fill a batch with the longest utterances, and one with those of the median length."""
        batches = []
        for place in (len(self._order), len(self._order) // 2 + 1):
            order = self._order[:place][::-1]
            count = max(1, seconds * self._rate // max(self._samples(order[0]), 1))
            rows = np.resize(order[:count], count).tolist()
            batches.append([Example((r,), self._samples(r), self._percent) for r in rows])
        return batches

    def _samples(self, row: int) -> int:
        return at_speed(int(self._rows[row]), self._percent)


def _accumulation(knobs: Mapping[str, Any]) -> int:
    return int(knobs.get("grad_accumulation_factor", 1))


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
