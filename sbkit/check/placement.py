"""Device and precision: what is declared, and what the machine meant has."""

import os
from collections.abc import Iterator

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.data.sampler import TrainSampler
from sbkit.data.splits import sample_counts
from sbkit.distributed.device import check_precision, choose_device, find_device, parse_device

CHECK = "placement"
MIN_STEPS = 4  # of an epoch; with fewer, many epochs change little
MOST_EMPTY = 0.1  # share of the micro-batches that may hold no utterance of their own


def check_placement(planned: PlannedRun) -> Iterator[Finding]:
    """Find a device that is not there, and precisions that it does not have."""
    device = choose_device(planned.knobs.get("device"), planned.count)
    for key in ("device", "precision", "eval_precision"):
        try:
            if key == "device":
                find_device(device, planned.count)
            else:
                check_precision(device.type, planned.knobs.get(key, "fp32"), key=key)
        except SbkitError as error:
            yield planned.finding(CHECK, key, **words_of(str(error)))


def check_shares(planned: PlannedRun) -> Iterator[Finding]:
    """Find batches too large for an epoch, or too small to share among the machine's processes."""
    sampler = planned.make_loaders().train.batch_sampler
    if not isinstance(sampler, TrainSampler):
        return
    accumulation = int(planned.knobs.get("grad_accumulation_factor", 1))
    processes = count_processes(planned)
    parts = processes * accumulation
    steps = sampler.steps()
    seconds = samples_to_seconds(
        int(sample_counts(planned.prepare_splits().train).sum()), planned.knobs["sample_rate"]
    )
    if len(steps) < MIN_STEPS and seconds < MIN_STEPS * planned.knobs["batch_seconds"]:
        yield planned.finding(
            CHECK,
            "batch_seconds",
            declared=f"an epoch must have at least {MIN_STEPS} steps to learn from",
            effect=f"with batches of {planned.knobs['batch_seconds']:g} s, the {seconds:,.0f} s of "
            f"train have {len(steps)}",
            fix="Lower --batch_seconds.",
            stops=False,
        )
    empty = sum(max(parts - len(step), 0) for step in steps) / (parts * len(steps))
    if empty > MOST_EMPTY:
        yield planned.finding(
            CHECK,
            "batch_seconds",
            declared=f"a batch must be enough for {plural(processes, 'process', 'processes')} with "
            f"{plural(accumulation, 'micro-batch', 'micro-batches')} each",
            effect=f"with {planned.knobs['batch_seconds']} s, {empty:.0%} of the {parts} "
            "micro-batches of a step are empty and computed for nothing",
            fix="Raise --batch_seconds, lower --grad_accumulation_factor, or start fewer "
            "processes.",
            stops=False,
        )


def count_processes(planned: PlannedRun) -> int:
    """Count the processes: torchrun's, or one for each device of the machine meant."""
    if planned.target is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, planned.count(parse_device(planned.target).type))
