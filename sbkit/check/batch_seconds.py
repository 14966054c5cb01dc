"""`batch_seconds: auto`: the largest batch whose step fits into memory, tried on the device."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.base.errors import SbkitError
from sbkit.base.machine import available_memory
from sbkit.base.units import at_speed, samples_to_seconds
from sbkit.check.cost import RealSteps, brain_in_place, peak_memory, reset_peak
from sbkit.check.model.dry_run import dry_run
from sbkit.check.model.placement import count_processes
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.declaration import CHECKPOINTS, read_declaration
from sbkit.checkpoint.folder import newest_described
from sbkit.config.hparams import read_knobs
from sbkit.data.batches.plan import Example, MicroBatch
from sbkit.data.batches.sampler import to_percents
from sbkit.data.corpora.columns import sample_counts
from sbkit.distributed.ranks import gather_over_ranks, main_rank_first, single_rank, world_size
from sbkit.logs.log import log, quiet
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

AUTO, KNOB = "auto", "batch_seconds"
PROBED = 3600.0  # seconds of a plan of which only the data is used
MARGIN = 0.9  # of the free memory that a step may take: the allocator's gaps, other processes
WORTH_TRYING = 1.1  # times what fits already
MIN_SECONDS = 0.1  # of an utterance, where one is empty
ON_CPU = 60.0  # seconds; 98 seconds of audio a second at 35, 104 at 60, 102 at 120, 65 at 240
LEAST_STEPS = 20  # of an epoch


@dataclass(frozen=True)
class FittingBatch:
    """The padded audio of one process's micro-batch.

    seconds: of it; peak, free: bytes that its step takes, and that are free; limit: what keeps it
    from being larger, where memory does not.
    """

    seconds: int
    peak: int
    free: int
    limit: str = ""

    def describe(self) -> str:
        """Write what it takes, and why it is not larger."""
        peak = f"peak {_gib(self.peak)} of {_gib(self.free)} GiB" if self.peak else ""
        return "; ".join(each for each in (peak, self.limit) if each)


UNTRIED = FittingBatch(60, 0, 0, "no step can be tried: see the errors of `sbkit check`")


def find_batch_seconds(
    yaml_file: Path,
    overrides: Mapping[str, object],
    *,
    recipe: Recipe | None = None,
    target: str | None = None,
) -> dict[str, object]:
    """Return the overrides with a number for `batch_seconds: auto`; others as they are.

    A run that goes on keeps the number that it began with. All ranks call this, and agree.

    Raises SbkitError: the memory is not known, or not even the longest utterance fits.
    """
    knobs = read_knobs(yaml_file, overrides)
    if knobs.get(KNOB) != AUTO:
        return dict(overrides)
    if target is not None:
        raise SbkitError(
            f"`{KNOB}` must be a number where --target is another machine, but is {AUTO}, which is "
            f"tried on this one. Pass --{KNOB}=NUMBER."
        )
    if recipe is not None or "recipe" in knobs:
        Run(yaml_file, overrides, recipe=recipe).check_ranges()
    if (before := _declared_before(knobs)) is not None:
        log(f"{KNOB}: {AUTO} -> {before:g}, as the run began")
        return {**overrides, KNOB: before}
    with main_rank_first(), single_rank(), quiet():
        probing = {**overrides, KNOB: max(PROBED, float(knobs.get("max_seconds") or 0))}
        with PlannedRun(yaml_file, probing, recipe=recipe) as planned:
            try:
                found = _try_steps(planned)
            except MissingPartError:  # which the checks report
                found = UNTRIED
    found = min(gather_over_ranks(found), key=lambda each: each.seconds)
    parts = world_size() * int(knobs.get("grad_accumulation_factor", 1))
    seconds = float(parts * found.seconds)
    log(f"{KNOB}: {AUTO} -> {seconds:g} ({found.describe()})")
    return {**overrides, KNOB: seconds}


def largest_fitting(
    peak_of: Callable[[int], int | None], *, least: int, most: float, free: int, limit: str
) -> FittingBatch | None:
    """Raise the seconds of a batch while its step fits; None where not even the least one does.

    peak_of: the bytes of a step of so many seconds, None where it does not fit; limit: why ``most``
    is the most.
    """
    room, seconds, found = int(MARGIN * free), least, None
    while (peak := peak_of(seconds)) is not None and peak <= room:
        found = FittingBatch(seconds, peak, free)
        larger = int(min(most, 2 * seconds, seconds * room / max(peak, 1)))
        if larger < WORTH_TRYING * seconds:
            return FittingBatch(seconds, peak, free, limit if larger >= int(most) else "")
        seconds = larger
    return found


def _try_steps(planned: PlannedRun) -> FittingBatch:
    """Find the largest batch of one process, before it has put anything on its device.

    Raises MissingPartError where the run cannot be built.
    """
    device = planned.placement.device
    free = _free_memory(device)
    if dry_run(planned).broken:
        return UNTRIED
    if free is None:
        raise SbkitError(
            f"`{KNOB}` must be a number where the free memory is not known, but is {AUTO} on "
            f"{device}. Pass --{KNOB}=NUMBER."
        )
    batches = _Batches(planned)
    accumulation = int(planned.knobs.get("grad_accumulation_factor", 1))
    most, limit = batches.total / LEAST_STEPS / count_processes(planned) / accumulation, ""
    limit = f"the epoch has {LEAST_STEPS} steps at least"
    if device.type == "cpu" and most > ON_CPU:
        most, limit = ON_CPU, "more is not faster on the CPU"
    with brain_in_place(planned) as brain:
        before = reset_peak(device) if device.type == "cpu" else 0
        steps = RealSteps(brain, planned.loaders.train, accumulates=accumulation > 1)

        def peak_of(seconds: int) -> int | None:
            try:
                for batch in batches.of(seconds):
                    steps.take(batch)
            except torch.OutOfMemoryError:
                return None
            return (peak_memory(device) or before) - before

        least = math.ceil(batches.longest)
        found = largest_fitting(peak_of, least=least, most=most, free=free, limit=limit)
    if found is None:
        raise SbkitError(
            f"`{KNOB}` must be at least the longest utterance ({batches.longest:.1f} s), but a "
            f"step of it alone does not fit into {_gib(MARGIN * free)} GiB. Lower --max_seconds, "
            "take a smaller model, or set --precision=bf16 where the device has it."
        )
    return found


class _Batches:
    """Batches of the longest and of the usual utterances of a planned run."""

    def __init__(self, planned: PlannedRun) -> None:
        self._samples = sample_counts(planned.loaders.splits.train)
        self._order = np.argsort(self._samples, kind="stable")
        self._percent = min(100, *to_percents(planned.knobs.get("speeds", [1.0])))
        self._rate = int(planned.knobs["sample_rate"])
        self.longest = self._seconds_of(-1)
        self.total = samples_to_seconds(int(self._samples.sum()), self._rate)

    def of(self, seconds: int) -> list[MicroBatch]:
        """Fill a batch with the longest utterances, and one with those of the median length."""
        last = len(self._order) - 1
        return [self._batch(place, seconds) for place in (last, last // 2)]

    def _seconds_of(self, place: int) -> float:
        samples = int(self._samples[self._order[place]])
        return samples_to_seconds(at_speed(samples, self._percent), self._rate)

    def _batch(self, place: int, seconds: int) -> MicroBatch:
        count = max(1, int(seconds / max(self._seconds_of(place), MIN_SECONDS)))
        rows = np.resize(self._order[: place + 1][::-1][:count], count).tolist()
        return [
            Example((row,), at_speed(int(self._samples[row]), self._percent), self._percent)
            for row in rows
        ]


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_memory() if device.type == "cpu" else None
    return free and free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _declared_before(knobs: Mapping[str, Any]) -> float | None:
    """Return the number of a run that goes on."""
    folder = knobs.get("output_folder")
    if folder is None or newest_described(Path(folder) / CHECKPOINTS) is None:
        return None
    value = read_declaration(Path(folder)).values.get(KNOB)
    return float(value) if isinstance(value, int | float) else None


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
