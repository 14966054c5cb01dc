"""How far a run is, and the learning rate that follows from it: nothing to save or restore."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, ClassVar

from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import SHARE


def check_schedule(hparams: Mapping[str, Any]) -> None:
    """Raise SbkitError for a `lr_schedule` that is no function of progress, as SpeechBrain's."""
    schedule = hparams.get("lr_schedule")
    if schedule is None:
        return
    counts = hasattr(hparams.get("epoch_counter"), "limit")
    rate = isinstance(hparams.get("lr"), int | float) or hparams.get("optimizers")
    if not (counts and rate and _gives_factor(schedule)):
        raise SbkitError(
            "`lr_schedule` must be a function from the progress of the run, 0 to 1, to a factor of "
            "the number `lr`, of at least 0, beside an `epoch_counter`, but is a "
            f" {type(schedule).__name__}. Take sbkit.train.schedule.WarmupCosine, or call "
            "a scheduler that the recipe steps by another name, such as `lr_annealing`."
        )


def _gives_factor(schedule: Any) -> bool:
    try:
        return bool(0 <= schedule(0.5) < math.inf)
    except Exception:  # a scheduler takes its optimizer, and fails on a number in any way
        return False


def set_rate(optimizers: Iterable[Optimizer], factor: float, rate: float | None) -> None:
    """Set the learning rate of every group: a rate, or else the optimizer's own, times the factor.

    A group with an `lr_scale` has that share of it.
    """
    for optimizer in optimizers:
        declared = optimizer.defaults["lr"] if rate is None else rate
        for group in optimizer.param_groups:
            group["lr"] = declared * factor * group.get("lr_scale", 1.0)


class WarmupCosine:
    """Rise in a line over ``warmup_fraction`` of the run, then fall along a half cosine.

    Source: Loshchilov and Hutter 2017, without restarts.
    """

    RANGES: ClassVar = {"warmup_fraction": SHARE}

    def __init__(self, *, warmup_fraction: float) -> None:
        self.warmup_fraction = warmup_fraction

    def __call__(self, progress: float) -> float:
        """Return the factor at a share of the run."""
        if progress < self.warmup_fraction:
            return progress / self.warmup_fraction
        fallen = (progress - self.warmup_fraction) / (1 - self.warmup_fraction)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))


def mark_last(
    batches: Iterable[Any], *, count: int | None, done: int
) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last of an epoch of which ``done`` were already seen.

    Where the number is not known, one batch is read ahead. That would do everywhere, but a loader
    that saves its place would be one too far.
    """
    if count is not None:
        yield from ((batch, number == count) for number, batch in enumerate(batches, done + 1))
        return
    for batch, following in pairwise(chain(batches, [None])):
        yield batch, following is None


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader, None where it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def share_of_steps(done: int, count: int | None, accumulation: int) -> float:
    """Return how much of an epoch lies before the step of the next micro-batch.

    In steps: a schedule that counted micro-batches would depend on the accumulation.
    """
    return (done // accumulation) / -(-count // accumulation) if count else 0.0
