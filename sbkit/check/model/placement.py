"""Device and precision: what is declared, what the machine meant has, and what would take effect.

The functions are those by which a run refuses a device or a precision.
"""

import os
from collections.abc import Iterator

from sbkit.base.errors import SbkitError
from sbkit.base.text import plural
from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.sampler import TrainSampler
from sbkit.distributed.device import check_precision, choose_device, find_device, parse_device

PLACEMENT = "placement"
MOST_EMPTY = 0.1  # share of the micro-batches that may hold no utterance of their own


def check_placement(planned: PlannedRun) -> Iterator[Finding]:
    """Find a device or a precision that would not take effect as declared."""
    yield from _find_refused(planned)
    yield from _find_idle_devices(planned)


def check_shares(planned: PlannedRun) -> Iterator[Finding]:
    """Find batches that are too small to be shared out among the processes of the machine meant."""
    sampler = getattr(planned.loaders.train, "batch_sampler", None)
    if not isinstance(sampler, TrainSampler):
        return
    accumulation = int(planned.knobs.get("grad_accumulation_factor", 1))
    processes = count_processes(planned)
    parts = processes * accumulation
    steps = sampler.steps()
    empty = sum(max(parts - len(step), 0) for step in steps) / (parts * len(steps))
    if empty > MOST_EMPTY:
        yield planned.finding(
            PLACEMENT,
            "batch_seconds",
            declared=f"a batch must be enough for {plural(processes, 'process', 'processes')} with "
            f"{plural(accumulation, 'micro-batch', 'micro-batches')} each",
            effect=f"with {planned.knobs.get('batch_seconds')} s, {empty:.0%} of the {parts} "
            "micro-batches of a step are empty and computed for nothing",
            fix="Raise --batch_seconds, lower --grad_accumulation_factor, or start fewer "
            "processes.",
            stops=False,
        )


def _find_refused(planned: PlannedRun) -> Iterator[Finding]:
    """Check device and precisions as a run does, each by itself, to find all faults at once."""
    knobs, reported = planned.knobs, {str(error) for error in planned.faults.values()}
    try:
        device = choose_device(knobs.get("device"), planned.count)
    except SbkitError:
        return  # reported as a fault of the placement, and without a device there is nothing to ask
    for key in ("device", "precision", "eval_precision"):
        try:
            if key == "device":
                find_device(device, planned.count)
            elif key in knobs:
                check_precision(device.type, knobs[key], key=key)
        except SbkitError as error:
            if str(error) not in reported:
                yield planned.finding(PLACEMENT, key, **words_of(str(error)))


def _find_idle_devices(planned: PlannedRun) -> Iterator[Finding]:
    """Find a device with a number on a machine that has several."""
    if planned.target is None:
        return
    meant = parse_device(planned.target).type
    there = planned.count(meant)
    declared = planned.placement.device
    if there > 1 and (declared.type != meant or ":" in str(planned.knobs.get("device"))):
        yield planned.finding(
            PLACEMENT,
            "device",
            declared=f"every one of the {there} {meant} devices should be used",
            effect=f"`device: {planned.knobs.get('device')}` places every process on {declared}",
            fix=f"Write --device={meant}, so that each process takes its own.",
            stops=False,
        )


def count_processes(planned: PlannedRun) -> int:
    """Count the processes: torchrun's, or one for each device of the machine meant."""
    if planned.target is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, planned.count(parse_device(planned.target).type))
