"""The learning rate, computed from the position in the run, so that a schedule saves no state.

The position includes the validations so far: a scheduler that follows a metric is called for each.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from speechbrain.nnet.schedulers import (
    LinearScheduler,
    NewBobScheduler,
    StepScheduler,
    TriStageLRSchedule,
    WarmCoolDecayLRSchedule,
)
from speechbrain.nnet.schedulers import ReduceLROnPlateau as SpeechBrainPlateau
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from sbkit.base.errors import ConfigError, concerning
from sbkit.base.libraries import place_of
from sbkit.base.ranges import Share

SPEECHBRAIN_SCHEDULERS = "speechbrain.nnet.schedulers"
DECLARED_RATE = "initial_lr"  # in an optimizer's group, as in torch: the rate that it is made with
MAX_SCHEDULED_STEPS = 100_000  # for `highest_factor`: torch's schedulers take 0.1 ms a step
TOTAL_STEPS = 10_000  # into which a run is divided for a schedule of torch's with `total_steps`


Validations = tuple[tuple[int, float], ...]  # epochs and metrics, negated if higher is better


class Position(NamedTuple):
    """Where in the run a step is: share of the run before it, step and epoch (from 1)."""

    progress: float
    step: int
    epoch: int
    validations: Validations = ()  # before the step


Schedule = Callable[[Position], float]  # returns a factor of the declared rate
Scheduler = Callable[[int], object]  # sets the rate of its optimizer for a step, from 1


def declared_rate(opt_class: Callable[..., Any]) -> float | None:
    """Return the `lr` that an optimizer's class, or a `!name:` of one, makes it with.

    >>> declared_rate(torch.optim.SGD), declared_rate(lambda parameters: None)
    (0.001, None)
    """
    try:
        rate = signature(opt_class).parameters["lr"].default
    except (KeyError, TypeError, ValueError):  # it has no such argument, or no signature
        return None
    return float(rate) if isinstance(rate, int | float) else None


@concerning("lr_schedule")
def parse_schedule(
    hparams: Mapping[str, Any],
    opt_class: Callable[..., Any] | None,
    *,
    higher_is_better: bool = False,
) -> Schedule | None:
    """Read `lr_schedule`, which gives a factor of the optimizer's rate in each step, or None.

    It is a function of progress, or a scheduler of SpeechBrain's or torch's that needs only the
    number of steps and epochs, or the metric that ranks checkpoints (``higher_is_better``).

    opt_class: makes the optimizer whose `lr` such a scheduler changes; of several `optimizers`, the
        first one counts.
    """
    declared = hparams.get("lr_schedule")
    if declared is None:
        return None
    kind = getattr(declared, "func", declared)
    name = getattr(kind, "__name__", type(kind).__name__)
    rename = "Give a scheduler that the recipe steps itself another name, such as `lr_annealing`."
    if not hasattr(hparams.get("epoch_counter"), "limit"):
        raise ConfigError(f"`lr_schedule` ({name}) needs an `epoch_counter` with a limit. {rename}")
    for optimizer in [*(hparams.get("optimizers") or {}).values()][:1]:
        opt_class = optimizer["opt_class"]
    rate = None if opt_class is None else declared_rate(opt_class)
    try:
        schedule = _adapt(declared, rate, higher_is_better=higher_is_better)
        schedule(Position(0.5, 2, 1, ((1, 0.5), (2, 0.5))))
    except Exception as error:  # a scheduler that needs something else may fail in any way
        raise ConfigError(
            "`lr_schedule` must be a function from the progress of the run, 0 to 1, to a factor of "
            f"`lr`, but {name} raised {type(error).__name__} ({error}{place_of(error)}). {rename}"
        ) from error
    return schedule


def _adapt(declared: Any, rate: float | None, *, higher_is_better: bool) -> Schedule:
    """Return a schedule of sbkit's, SpeechBrain's or torch's as a function of the position.

    The rates of SpeechBrain and torch are divided by the optimizer's. The rate of step n is the one
    after n calls of SpeechBrain's scheduler, or n - 1 calls of torch's. The rate of epoch n is the
    one after the call for epoch n - 1.
    """
    kind = getattr(declared, "func", declared)
    is_of_torch = isinstance(kind, type) and issubclass(kind, LRScheduler)
    if not is_of_torch and type(declared).__module__ != SPEECHBRAIN_SCHEDULERS:
        return lambda position: declared(position.progress)
    if not rate:
        raise TypeError("it needs an optimizer with an argument `lr` above 0")
    if is_of_torch and not issubclass(kind, ReduceLROnPlateau):
        return _adapt_torch(declared, rate)
    if is_of_torch or isinstance(declared, NewBobScheduler | SpeechBrainPlateau):
        return _follow_validations(declared, rate, higher_is_better=higher_is_better)
    if isinstance(declared, LinearScheduler | StepScheduler):
        return lambda position: declared(position.epoch - 1)[1] / rate
    takes_step = isinstance(declared, WarmCoolDecayLRSchedule | TriStageLRSchedule)

    def begin(optimizer: Optimizer) -> Scheduler:
        scheduler = deepcopy(declared)  # the recipe may call its own
        return lambda step: scheduler(optimizer, *([step] if takes_step else []))

    stepped = _SteppedScheduler(begin, rate)
    return lambda position: stepped.factor(position.step)


def _adapt_torch(declared: Callable[..., LRScheduler], rate: float) -> Schedule:
    """Return torch's scheduler by optimizer steps; one with `total_steps` spans the whole run."""
    kind: Any = getattr(declared, "func", declared)
    has_length = issubclass(kind, OneCycleLR)
    lengths = {"total_steps", "epochs", "steps_per_epoch"} & {*getattr(declared, "keywords", ())}
    if has_length and lengths:
        raise TypeError(f"{min(lengths)} is the length of the run, which sbkit knows: leave it out")

    def begin(optimizer: Optimizer) -> Scheduler:
        length = {"total_steps": TOTAL_STEPS} if has_length else {}
        scheduler = declared(optimizer, **length)

        def call(step: int) -> None:
            if step > 1:
                optimizer.step()
                scheduler.step()

        return call

    stepped = _SteppedScheduler(begin, rate)
    if has_length:
        return lambda position: stepped.factor(1 + int(position.progress * (TOTAL_STEPS - 1)))
    return lambda position: stepped.factor(position.step)


def _follow_validations(declared: Any, rate: float, *, higher_is_better: bool) -> Schedule:
    """Return a scheduler that takes a metric; it is called anew for all validations so far."""
    is_torch = hasattr(declared, "func") or isinstance(declared, type)
    if "mode" in getattr(declared, "keywords", ()):
        raise TypeError("mode is the direction of the metric, which sbkit knows: leave it out")
    if higher_is_better and not is_torch:
        raise TypeError("the metric of this recipe rises; torch's ReduceLROnPlateau takes it")

    @lru_cache(maxsize=1)  # the validations seldom change
    def factor(validations: Validations) -> float:
        optimizer = _DummyOptimizer(rate)
        group = optimizer.param_groups[0]
        mode = "max" if higher_is_better else "min"
        scheduler = declared(optimizer, mode=mode) if is_torch else deepcopy(declared)
        group["lr"] = getattr(scheduler, "hyperparam_value", rate)  # NewBob's
        for epoch, error in validations:
            if is_torch:
                scheduler.step(-error if higher_is_better else error)
            elif hasattr(scheduler, "hyperparam_value"):
                _, group["lr"] = scheduler(error)
            else:
                _, group["lr"] = scheduler([optimizer], epoch, error)
        return float(group["lr"]) / rate

    return lambda position: factor(position.validations)


class _DummyOptimizer(Optimizer):
    """An optimizer that has only a rate for a scheduler to set, and no momentum."""

    def __init__(self, rate: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": rate})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


class _SteppedScheduler:
    """A scheduler that catches up with the present step, call by call, so it has no saved state."""

    def __init__(self, begin: Callable[[Optimizer], Scheduler], rate: float) -> None:
        self._begin = begin
        self._rate = rate
        self._calls = 0

    def factor(self, step: int) -> float:
        if self._calls == 0 or step < self._calls:
            self._optimizer = _DummyOptimizer(self._rate)
            self._calls = 0
            self._call = self._begin(self._optimizer)
        while self._calls < step:
            self._calls += 1
            self._call(self._calls)
        return float(self._optimizer.param_groups[0]["lr"]) / self._rate


def highest_factor(
    schedule: Schedule | None, num_steps: int = TOTAL_STEPS, num_epochs: int = 1
) -> float:
    """Return the highest factor of a schedule in a run of so many steps and epochs.

    It is computed at 200 steps of equal distance, and at steps that are 5 % apart, for peaks of
    short warm-ups. A scheduler that takes step after step is asked for at most 100,000.
    """
    shares = {index / 200 for index in range(201)} | {1.05**-power for power in range(300)}
    if schedule is None:
        return 1.0
    highest = 0.0
    for share in sorted(shares):
        step = min(MAX_SCHEDULED_STEPS, 1 + int(share * (num_steps - 1)))
        highest = max(highest, schedule(Position(share, step, 1 + int(share * (num_epochs - 1)))))
    return highest


def set_rate(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set the rate of each group to its declared rate times a factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # A recipe may have made its optimizers itself, or added groups.
            is_kept = DECLARED_RATE in group
            rate = group[DECLARED_RATE] if is_kept else optimizer.defaults["lr"]
            group["lr"] = rate * factor


class WarmupCosine:
    """Rise linearly over ``warmup_fraction`` of the run, then fall along a half cosine.

    Source: Loshchilov and Hutter 2017, without restarts.

    >>> schedule = WarmupCosine(warmup_fraction=0.1)
    >>> [round(schedule(progress), 2) for progress in (0, 0.05, 0.1, 0.55, 1)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(self, *, warmup_fraction: Share) -> None:
        self.warmup_fraction = warmup_fraction

    def __call__(self, progress: float) -> float:
        """Return the factor at a share of the run."""
        if progress < self.warmup_fraction:
            return progress / self.warmup_fraction
        fallen = (progress - self.warmup_fraction) / max(1e-9, 1 - self.warmup_fraction)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))
