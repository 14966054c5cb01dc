"""The learning rate depends only on the position in the run."""

import math
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speechbrain.nnet import schedulers
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.epoch_loop import EpochCounter
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import OneCycleLR

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.train.schedule import (
    MAX_SCHEDULED_STEPS,
    Position,
    WarmupCosine,
    highest_factor,
    parse_schedule,
)
from tests.train.lines import MeanBrain, batches, brain_of


def test_schedule_factor_by_share_of_run() -> None:
    """Its docstring has other points."""
    points = ((0.2, 0.4, 0.5 + math.sqrt(0.5) / 2), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))
    for warmup_fraction, progress, factor in points:
        schedule = WarmupCosine(warmup_fraction=warmup_fraction)
        assert schedule(progress) == pytest.approx(factor, abs=1e-12)


SGD = partial(torch.optim.SGD, lr=0.1)


def declared(schedule: Any, **settings: Any) -> dict[str, Any]:
    counter = SimpleNamespace(limit=4, current=1)
    return {"epoch_counter": counter, "lr_schedule": schedule, **settings}


def test_unsupported_scheduler_is_refused() -> None:
    """The message names what is missing or wrong: a direction, a length of the run, a momentum."""
    for scheduler, words in (
        (partial(torch_schedulers.ReduceLROnPlateau, mode="max"), "direction of the metric"),
        (partial(OneCycleLR, max_lr=0.1), "OneCycleLR.*`cycle_momentum` option"),
        (partial(OneCycleLR, max_lr=0.1, total_steps=9), "total_steps is the length of the run"),
        ("cosine", "but str raised TypeError"),
    ):
        with pytest.raises(SbkitError, match="`lr_schedule` must be a function.*" + words):
            parse_schedule(declared(scheduler), SGD)
    with pytest.raises(SbkitError, match=r"NewBobScheduler raised .*\(the metric"):
        parse_schedule(declared(schedulers.NewBobScheduler(0.1)), SGD, higher_is_better=True)
    with pytest.raises(SbkitError, match=r"\(WarmupCosine\) needs an `epoch_counter`"):
        parse_schedule(declared(WarmupCosine(warmup_fraction=0.1), epoch_counter=None), SGD)
    for opt_class in (None, lambda parameters: SGD(parameters)):
        with pytest.raises(SbkitError, match="needs an optimizer with an argument `lr`"):
            parse_schedule(declared(schedulers.NoamScheduler(0.1, 3)), opt_class)


def factors(schedule: Any, steps: int = 8, epochs: int = 4) -> list[float]:
    read = parse_schedule(declared(schedule), SGD)
    assert read is not None
    per_epoch = steps // epochs
    return [read(Position(step / steps, step + 1, step // per_epoch + 1)) for step in range(steps)]


def test_speechbrain_schedulers_give_same_rates() -> None:
    noam, optimizer = schedulers.NoamScheduler(0.1, 3), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    expected = [noam(optimizer)[1] for _ in range(8)]
    assert [0.1 * factor for factor in factors(schedulers.NoamScheduler(0.1, 3))] == expected
    stages = schedulers.TriStageLRSchedule(0.1, 2, 2, 4, 8)
    assert factors(stages)[1:4] == pytest.approx([1.0, 1.0, 1.0])
    halved = schedulers.StepScheduler(0.1, decay_factor=0.5, decay_drop=1)
    assert factors(halved) == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625])


def test_torch_schedulers_advance_by_step_and_one_cycle_spans_the_run() -> None:
    falling = partial(torch_schedulers.ExponentialLR, gamma=0.5)
    assert factors(falling)[:3] == [1.0, 0.5, 0.25]
    cycle = factors(partial(OneCycleLR, max_lr=0.1, cycle_momentum=False, pct_start=0.5), 1000)
    assert cycle[0] == pytest.approx(0.04, rel=1e-3)
    assert cycle[500] == pytest.approx(1.0, rel=1e-3)
    assert cycle[-1] < 1e-3


def test_rate_falls_once_the_metric_no_longer_improves() -> None:
    plateau = partial(torch_schedulers.ReduceLROnPlateau, patience=0, factor=0.5)
    new_bob = schedulers.NewBobScheduler(0.1)
    old = schedulers.ReduceLROnPlateau(patience=0, dont_halve_until_epoch=2)
    for schedule, higher_is_better, errors, factor in (
        *((plateau, False, (3, 2, 1), 1.0), (plateau, False, (3, 2, 3, 3), 0.25)),
        *((plateau, True, (-3, -2, -1), 0.25), (plateau, True, (-1, -2, -3), 1.0)),
        *((new_bob, False, (3, 2, 1, 2), 0.5), (old, False, (1, 1, 2), 0.5)),
    ):
        read = parse_schedule(declared(schedule), SGD, higher_is_better=higher_is_better)
        assert read is not None and highest_factor(read) == 1.0
        assert read(Position(0.5, 9, 5, tuple(enumerate(errors, 1)))) == pytest.approx(factor)


@pytest.mark.parametrize("steps", [1, 20, 2000])
def test_highest_factor_is_that_of_the_steps_of_the_run(steps: int) -> None:
    for schedule in (
        *(schedulers.NoamScheduler(0.1, warm_up) for warm_up in (10, 700, 25_000)),
        schedulers.LinearScheduler(0.01, 0.1, 4),
        partial(torch_schedulers.LinearLR, start_factor=0.1, total_iters=50),
    ):
        epochs = min(4, steps)
        highest = highest_factor(parse_schedule(declared(schedule), SGD), steps, epochs)
        assert highest == pytest.approx(max(factors(schedule, steps, epochs)), rel=0.05)
    assert highest_factor(None, steps) == 1.0


def test_highest_factor_asks_for_the_whole_run_but_not_for_too_many_steps() -> None:
    positions: list[Position] = []

    def schedule(position: Position) -> float:
        positions.append(position)
        return position.progress

    assert highest_factor(schedule, 10**7, 3) == 1.0
    assert {position.epoch for position in positions} == {1, 2, 3}
    assert max(position.step for position in positions) == MAX_SCHEDULED_STEPS


class Fitting(MeanBrain):
    def on_fit_batch_end(self, *_: Any) -> None:
        self.hparams.rates.append(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "schedule",
    [
        schedulers.NoamScheduler(0.1, 3),
        partial(OneCycleLR, max_lr=0.1, cycle_momentum=False),
        partial(torch_schedulers.CosineAnnealingLR, T_max=5),
        schedulers.NewBobScheduler(0.1, improvement_threshold=1.0),
        partial(torch_schedulers.ReduceLROnPlateau, patience=0, threshold=0.9),
    ],
    ids=["noam", "one-cycle", "cosine", "new-bob", "plateau"],
)
def test_resumed_run_has_same_rates_and_weights(schedule: Any, tmp_path: Path) -> None:
    def run(folder: Path, epochs: int) -> tuple[list[float], torch.Tensor]:
        counter = EpochCounter(limit=4)
        settings = declared(schedule, epoch_counter=counter, rates=[])
        checkpointer = SpeechBrainCheckpointer(folder, {"epochs": counter})
        brain = brain_of(Fitting, hparams=settings, checkpointer=checkpointer)
        checkpointer.add_recoverable("model", brain.modules.model)
        brain.fit(islice(counter, epochs) if epochs < 4 else counter, batches(3), batches(2))
        checkpointer.save_checkpoint()
        return brain.hparams.rates, brain.modules.model.weight.detach()

    whole, weights = run(tmp_path / "whole", 4)
    first, _ = run(tmp_path / "stopped", 2)
    rates, resumed = run(tmp_path / "stopped", 4)
    assert len(whole) == 12 and len({*whole}) >= 3
    assert first + rates == whole
    assert torch.equal(resumed, weights)


def two_rates(parameters: Any, lr: float) -> torch.optim.SGD:
    """Make an optimizer that gives its second parameter a tenth of the rate."""
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": lr / 10}], lr=lr)


@pytest.mark.parametrize(
    "schedule", [None, WarmupCosine(warmup_fraction=0.5)], ids=["none", "cosine"]
)
@pytest.mark.parametrize("make", [Checkpointer, SpeechBrainCheckpointer])
def test_declared_rate_of_each_group_counts_also_after_a_resume(
    schedule: Any, make: Any, tmp_path: Path
) -> None:
    """The key `lr` beside the optimizer used to decide; a checkpoint kept a constant rate."""
    for epochs, rate in enumerate((0.1, 0.2, 0.0, 0.3), start=1):
        counter = EpochCounter(limit=10)
        settings = declared(
            schedule, epoch_counter=counter, lr=9.0, remove_vector_weight_decay=False
        )
        checkpointer = make(tmp_path, recoverables={"epochs": counter})
        options = {"optimizer": two_rates, "lr": rate, "hparams": settings}
        brain = brain_of(checkpointer=checkpointer, **options)
        checkpointer.add_recoverable("model", brain.modules.model)
        brain.fit(islice(counter, 1), batches(2), batches(2))
        checkpointer.save_checkpoint()
        factor = 1 if schedule is None else schedule((2 * epochs - 1) / 20)
        rates = [group["lr"] for group in brain.optimizer.param_groups]
        assert rates == pytest.approx([rate * factor, rate * factor / 10])


def test_groups_that_a_recipe_adds_are_resumed(tmp_path: Path) -> None:
    class Adding(MeanBrain):
        def init_optimizers(self) -> None:
            weight, bias = self.modules.model.parameters()
            self.optimizer = self.opt_class([weight])
            self.optimizer.add_param_group({"params": [bias], "lr": 0.01})
            self.optimizers_dict = {"opt_class": self.optimizer}
            self.checkpointer.add_recoverable("optimizer", self.optimizer)

    for _ in range(2):
        counter = EpochCounter(limit=10)
        checkpointer = Checkpointer(tmp_path, recoverables={"epochs": counter})
        settings = {"epoch_counter": counter}
        brain = brain_of(Adding, checkpointer=checkpointer, hparams=settings)
        checkpointer.add_recoverable("model", brain.modules.model)
        brain.fit(islice(counter, 1), batches(2), batches(2))
        assert [group["lr"] for group in brain.optimizer.param_groups] == [0.1, 0.01]
