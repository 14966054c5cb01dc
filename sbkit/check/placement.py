"""Device and precision: what is declared, what the machine meant has, and what would take effect.

What a run refuses in a sentence is asked of the same functions that the run asks.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.amp.grad_scaler import GradScaler

from sbkit.check.finding import Finding, words_of
from sbkit.check.subject import MissingPartError, Subject
from sbkit.data.sampler import TrainSampler
from sbkit.machine.options import OLD_PRECISIONS
from sbkit.tensors.device import (
    check_precision,
    choose_device,
    find_device,
    parse_device,
)
from sbkit.values.errors import SbkitError

PLACEMENT = "placement"
MOST_EMPTY = 0.1  # share of the micro-batches that may hold no utterance of their own


def check_placement(subject: Subject) -> Iterator[Finding]:
    """Find a device, a precision or a GradScaler that would not take effect as declared."""
    yield from _find_refused(subject)
    yield from _find_old_names(subject)
    yield from _find_idle_devices(subject)
    yield from _find_idle_scalers(subject)


def check_shares(subject: Subject) -> Iterator[Finding]:
    """Find batches that are too small to be shared out among the processes of the machine meant."""
    sampler = getattr(subject.loaders.train, "batch_sampler", None)
    if not isinstance(sampler, TrainSampler):
        return
    accumulation = int(subject.knobs.get("grad_accumulation_factor", 1))
    processes = count_processes(subject)
    parts = processes * accumulation
    steps = sampler.steps()
    empty = sum(max(parts - len(step), 0) for step in steps) / (parts * len(steps))
    if empty > MOST_EMPTY:
        yield subject.finding(
            PLACEMENT,
            "batch_seconds",
            declared=f"a step of {subject.knobs.get('batch_seconds')} s for {processes} processes"
            f" and {accumulation} micro-batches of each",
            effect=f"{empty:.0%} of the {parts} parts of a step hold no utterance: whoever gets "
            "one computes for nothing",
            mend="Raise --batch_seconds, lower --grad_accumulation_factor, or start fewer "
            "processes.",
            stops=False,
        )


def _find_refused(subject: Subject) -> Iterator[Finding]:
    """Ask everything that a run would ask, each by itself, so that all faults are found at once."""
    knobs, told = subject.knobs, {str(error) for error in subject.faults.values()}
    try:
        device = choose_device(knobs.get("device"), subject.count)
    except SbkitError:
        return  # told as a fault of the placement, and without a device there is nothing to ask
    questions: list[tuple[str, Callable[[], Any]]] = [
        ("device", lambda: find_device(device, subject.count)),
        *((key, _precision_question(subject, device.type, key)) for key in _precisions(subject)),
    ]
    for key, ask in questions:
        try:
            ask()
        except SbkitError as error:
            if str(error) not in told:
                yield subject.finding(PLACEMENT, key, **words_of(str(error)))


def _precisions(subject: Subject) -> list[str]:
    return [key for key in ("precision", "eval_precision") if key in subject.knobs]


def _precision_question(subject: Subject, device_type: str, key: str) -> Callable[[], None]:
    return lambda: check_precision(device_type, subject.knobs[key], key=key)


def _find_old_names(subject: Subject) -> Iterator[Finding]:
    """SpeechBrain's names of a precision win over `precision`, whatever that says."""
    declared = subject.knobs.get("precision")
    for key, precision in OLD_PRECISIONS.items():
        if subject.knobs.get(key) and declared not in (None, precision):
            yield subject.finding(
                PLACEMENT,
                key,
                declared=f"precision: {declared}",
                effect=f"{key}: True makes it {precision}",
                mend=f"Take `{key}` away, and write precision: {precision} where it is meant.",
            )


def _find_idle_devices(subject: Subject) -> Iterator[Finding]:
    """A number fits one process; the machine meant has devices for more."""
    if subject.target is None:
        return
    meant = parse_device(subject.target).type
    there = subject.count(meant)
    declared = subject.placement.device
    if there > 1 and (declared.type != meant or _is_numbered(subject)):
        yield subject.finding(
            PLACEMENT,
            "device",
            declared=f"device: {subject.knobs.get('device')}, for a machine with {there} {meant} "
            "devices",
            effect=f"one process runs on {declared}; {there} of torchrun would be refused, or "
            "share it",
            mend=f"Write --device={meant}, so that each process takes its own.",
            stops=False,
        )


def _find_idle_scalers(subject: Subject) -> Iterator[Finding]:
    """A GradScaler scales for fp16 alone; with another precision it only costs its checks."""
    precision = subject.placement.precision
    if precision == "fp16":
        return
    for keys, holder in _holders(subject):
        for name, value in holder.items():
            if isinstance(value, GradScaler) and value.is_enabled():
                yield subject.finding(
                    PLACEMENT,
                    name if name in subject.document.root else "precision",
                    declared=f"precision: {precision}, and `{keys}{name}`, a GradScaler that is on",
                    effect="it would scale the loss, and check every gradient, for nothing",
                    mend="Take it away: sbkit makes one where the precision is fp16.",
                )


def _holders(subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", subject.hparams
    try:
        yield "brain.", vars(subject.brain)
    except MissingPartError:
        return


def _is_numbered(subject: Subject) -> bool:
    return ":" in str(subject.knobs.get("device"))


def count_processes(subject: Subject) -> int:
    """Count the processes: torchrun's, or one for each device of the machine meant."""
    if subject.target is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, subject.count(parse_device(subject.target).type))
