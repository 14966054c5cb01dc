"""`batch_seconds: auto`: the largest batch whose step fits into memory, tried on the device.

A line through small steps says how large it may be, one real step of the longest utterances shows
whether it is so. More memory than that is not always a better batch: what limits it is said.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from sbkit.base.errors import SbkitError
from sbkit.base.units import at_speed, samples_to_seconds
from sbkit.check.cost.prediction import brain_in_place, free_memory, try_optimizer
from sbkit.check.cost.probe import UNIT, measure_step_memory, peak_of_step
from sbkit.check.model.dry_run import dry_run
from sbkit.check.model.placement import count_processes
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.declaration import CHECKPOINTS, read_declaration
from sbkit.checkpoint.listing import newest_described
from sbkit.config.hparams import read_knobs
from sbkit.data.batches.plan import Example, MicroBatch
from sbkit.data.batches.sampler import to_percents
from sbkit.data.corpora.columns import sample_counts
from sbkit.distributed.ranks import alone, gather_over_ranks, main_rank_first, world_size
from sbkit.distributed.rendezvous import read_number
from sbkit.logs.log import quiet, say
from sbkit.train.buffers import unchanged
from sbkit.train.memory import bytes_of
from sbkit.train.recipe import Recipe
from sbkit.train.run import Run

AUTO, KNOB = "auto", "batch_seconds"
PROBED = 3600.0  # seconds of a plan of which nothing but its data is used
MARGIN = 0.9  # of the free memory that a step may take: the allocator's gaps, other processes
SMALLER = 0.8  # what is tried where a batch did not fit
MIN_SECONDS = 0.1  # of an utterance, where one is empty
ON_CPU = 60.0  # seconds; 98 seconds of audio a second at 35, 104 at 60, 102 at 120, 65 at 240
LEAST_STEPS = 20  # of an epoch


@dataclass(frozen=True)
class FittingBatch:
    """The padded audio of one process's micro-batch.

    seconds: of it; peak, free: bytes that its step takes, and that there are; limit: what keeps it
    from being larger, where memory does not.
    """

    seconds: int
    peak: int
    free: int
    limit: str = ""

    def describe(self) -> str:
        """Say what it takes, and why it is not larger."""
        peak = f"peak {_gib(self.peak)} of {_gib(self.free)} GiB" if self.peak else ""
        return "; ".join(each for each in (peak, self.limit) if each)


UNTRIED = FittingBatch(60, 0, 0, "no step can be tried: see the errors of `sbkit check`")


class _Trial:
    """Real steps of a planned run, of the longest and of the usual utterances."""

    def __init__(self, planned: PlannedRun, brain: Any) -> None:
        self._planned, self._brain = planned, brain
        self._loader = planned.loaders.train
        self._samples = sample_counts(planned.loaders.splits.train)
        self._order = np.argsort(self._samples, kind="stable")
        self._percent = min(100, *to_percents(planned.knobs.get("speeds", [1.0])))
        self._rate = int(planned.knobs["sample_rate"])
        self._optimizer, _ = try_optimizer(planned)

    @property
    def longest(self) -> float:
        """Return the seconds of the longest utterance, at the slowest speed."""
        return self._seconds_of(-1)

    @property
    def total(self) -> float:
        """Return the seconds of the training set."""
        return samples_to_seconds(int(self._samples.sum()), self._rate)

    @property
    def held(self) -> int:
        """Count the bytes of model, gradients and optimizer."""
        parameters = [*self._brain.modules.parameters()]
        gradients = bytes_of(each for each in parameters if each.requires_grad)
        return bytes_of([*parameters, *self._brain.modules.buffers()]) + gradients + self._optimizer

    def estimate(self, room: int) -> float:
        """Return the seconds of the longest utterances that fit into so many bytes, by a line."""
        places = np.linspace(0, len(self._order) - 1, 11).astype(int)
        plan = [self._batch(int(place), PROBED) for place in places]
        fixed, per_audio, per_square = measure_step_memory(self._brain, self._loader, plan).terms
        units = self.longest * self._rate / UNIT
        rate = max(per_audio + per_square * units, 1.0)
        return max(0.0, room - fixed) / rate * UNIT / self._rate

    def peak(self, seconds: float) -> int:
        """Return the most bytes of a step of so much audio; raises torch.OutOfMemoryError."""
        last = len(self._order) - 1
        plans = [self._batch(place, seconds) for place in (last, last // 2)]
        return self.held + max(peak_of_step(self._brain, self._loader, plan) for plan in plans)

    def refuse(self, free: int) -> NoReturn:
        """Raise SbkitError: not even the longest utterance fits."""
        raise SbkitError(
            f"`batch_seconds` must be at least the longest utterance ({self.longest:.1f} s), but "
            f"a step of it alone does not fit into {_gib(MARGIN * free)} GiB. Lower --max_seconds, "
            "take a smaller model, or set --precision=bf16 where the device has it."
        )

    def _seconds_of(self, place: int) -> float:
        samples = int(self._samples[self._order[place]])
        return samples_to_seconds(at_speed(samples, self._percent), self._rate)

    def _batch(self, place: int, seconds: float) -> MicroBatch:
        """Fill a batch with the utterances up to a place in the order of lengths."""
        count = max(1, int(seconds / max(self._seconds_of(place), MIN_SECONDS)))
        longest_first = self._order[: place + 1][::-1]
        rows = np.resize(longest_first[:count], count).tolist()
        return [
            Example((row,), at_speed(int(self._samples[row]), self._percent), self._percent)
            for row in rows
        ]


def settle(
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
        Run(yaml_file, overrides, recipe=recipe).refuse_out_of_range()
    if (before := _declared_before(knobs)) is not None:
        say(f"{KNOB}: {AUTO} -> {before:g}, as the run began")
        return {**overrides, KNOB: before}
    with main_rank_first(), alone(), quiet():
        probing = {**overrides, KNOB: max(PROBED, float(knobs.get("max_seconds") or 0))}
        with PlannedRun(yaml_file, probing, recipe=recipe) as planned:
            try:
                found = _find(planned)
            except MissingPartError:  # which the checks tell of
                found = UNTRIED
    found = min(gather_over_ranks(found), key=lambda each: each.seconds)
    parts = world_size() * int(knobs.get("grad_accumulation_factor", 1))
    seconds = float(parts * found.seconds)
    say(f"{KNOB}: {AUTO} -> {seconds:g} ({found.describe()})")
    return {**overrides, KNOB: seconds}


def _find(planned: PlannedRun) -> FittingBatch:
    """Find the largest batch of one process, before it has put anything on its device.

    Raises MissingPartError where the run cannot be built.
    """
    free = free_memory(planned)
    if dry_run(planned).broken or dry_run(planned).mismatches:
        return UNTRIED
    if free is None:
        raise SbkitError(
            f"`{KNOB}` must be a number where the free memory is not known, but is {AUTO} on "
            f"{planned.placement.device}. Pass --{KNOB}=NUMBER."
        )
    if planned.placement.device.type == "cpu":
        free //= read_number(os.environ, "LOCAL_WORLD_SIZE", default="1")
    with brain_in_place(planned) as brain, unchanged(brain.modules, brain.device):
        trial = _Trial(planned, brain)
        parts = count_processes(planned) * int(planned.knobs.get("grad_accumulation_factor", 1))
        most, limit = _limit(trial, planned.placement.device.type, parts)
        return _try(trial, free, most, limit)


def _limit(trial: _Trial, device: str, parts: int) -> tuple[float, str]:
    """Return the seconds beyond which a batch is no better, and why."""
    of_corpus = trial.total / LEAST_STEPS / parts
    limits = [(of_corpus, f"the epoch has {LEAST_STEPS} steps at least")]
    if device == "cpu":
        limits.append((ON_CPU, "more is not faster on the CPU"))
    return min(limits)


def _try(trial: _Trial, free: int, most: float, limit: str) -> FittingBatch:
    """Take real steps, smaller ones until one fits."""
    room = int(MARGIN * free)
    least = math.ceil(trial.longest)
    fitting = trial.estimate(room - trial.held)
    seconds = max(least, int(min(fitting, most)))
    while True:
        peak: int | None = None
        with suppress(torch.OutOfMemoryError):
            peak = trial.peak(seconds)
        if peak is not None and peak <= room:
            return FittingBatch(seconds, peak, free, limit if fitting > most else "")
        if seconds == least:
            trial.refuse(free)
        seconds, limit = max(least, int(SMALLER * seconds)), ""


def _declared_before(knobs: Mapping[str, Any]) -> float | None:
    """Return the number of a run that goes on."""
    folder = knobs.get("output_folder")
    if folder is None or newest_described(Path(folder) / CHECKPOINTS) is None:
        return None
    declaration = read_declaration(Path(folder))
    value = None if declaration is None else declaration.values.get(KNOB)
    return float(value) if isinstance(value, int | float) else None


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
