"""`sbkit check --learn`: overfit eight clips with the run's own model, optimizer and device.

Masks and augmentation are off, and dropout is on. The rate is the highest of the schedule, after a
short warm-up. If the clips are not learned, a short sweep tries other rates. Recognizers must write
the clips; for any other Brain, the loss on the clips must fall.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from speechbrain import Stage

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed, plural
from sbkit.check.dry_run import completed_dry_run, unused_parameters
from sbkit.check.planned_run import Finding, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.batch import Loader
from sbkit.data.splits import sample_counts, spread_rows
from sbkit.evaluate.wer import TOKENS_WRITTEN
from sbkit.evaluate.wer_report import MAX_SILENT_SHARE
from sbkit.logs.handlers import quiet
from sbkit.logs.metric import describe_values
from sbkit.train.advice import describe_ratio
from sbkit.train.brain import training_loss
from sbkit.train.optimizers import named_parameters
from sbkit.train.schedule import highest_factor, read_schedule, set_rate
from sbkit.train.step import as_loss

LEARNING_TEST = "learn"  # the name of the test in `PlannedRun.results`
NUM_CLIPS = 8
SHORTER_SHARE = 0.6  # of the clips: long ones would take longer
TRAINING_SECONDS = 40.0
MIN_STEPS, MAX_STEPS = 20, 500
MIN_SWEPT_STEPS, MAX_SWEPT_STEPS = 8, 30
WARM_UP_STEPS = 10
SWEPT_FACTORS = (1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3)  # of the run's own rate
MAX_LEARNED_CER = 0.2
MAX_DROPOUT = 0.5  # with more, a model that fits the clips may still fail
MIN_LEARNED_FALL = 0.2  # of the first loss, for a recipe without CER
MIN_FALL = 0.03  # of the first loss; with less, it does not fall
FULL_FALL = 0.98  # of the first loss; training then stops early
MIN_BETTER_FALL = 0.3  # from the loss at the run's own rate, for another rate to be better
MAX_GOOD_RISE = 0.1  # above the best loss of a sweep; the lowest such rate is suggested
# Keys of a YAML whose objects are taken out, and keys that are set to 0.
NULL_OBJECTS = {"spec_augment", "wave_augment", "lr_schedule"}
ZERO_KEYS = ("mask_time_prob", "mask_channel_prob", "ema_decay")


@dataclass(frozen=True, kw_only=True)
class LearningTest:
    """The result of training on a few clips.

    outcome: passed, failed or unfinished.
    losses: the training loss of each step.
    values: the metrics of the clips afterwards.
    """

    outcome: str
    description: str
    losses: list[float]
    values: dict[str, float]


def check_learning(planned: PlannedRun) -> Iterator[Finding]:
    """Report a model that does not learn a few clips, the signs, and what to try."""
    completed_dry_run(planned)
    with preserve_rng(planned.choose_placement().device), quiet():
        learner = Learner(planned)
        losses = learner.train(MAX_STEPS)
        values, description = learner.evaluate(losses)
        dead_parts = learner.parts_without_gradient()
        fall = relative_fall(losses[-1], losses[0])
        is_learned = fall >= MIN_LEARNED_FALL
        if "CER" in values:
            is_learned = values["CER"] <= MAX_LEARNED_CER
        is_passed = is_learned and not dead_parts
        rate_sign, rate_fix = ("", "") if is_passed else learner.sweep(losses)
    is_flat = not fall > MIN_FALL  # also if it is NaN
    outcome = "unfinished"
    fix = "The time was too short: repeat this on the device that will train."
    if is_passed:
        outcome = "passed"
    elif is_flat or dead_parts or rate_sign or len(losses) == MAX_STEPS:
        outcome = "failed"
        fix = rate_fix or "Try a smaller model, or one with fewer of your own parts."
        if dead_parts:
            fix = "Let them reach the loss: look for detach(), no_grad() and NumPy in forward()."
    if planned.knobs.get("dropout", 0) > MAX_DROPOUT:
        fix = f"Lower `dropout`, which hides {planned.knobs['dropout']:.0%} of the model. {fix}"
    planned.results[LEARNING_TEST] = LearningTest(
        outcome=outcome, description=description, losses=losses, values=values
    )
    if is_passed:
        return
    signs = ["the loss does not fall" if is_flat else "the loss falls"]
    if values.get(TOKENS_WRITTEN, 1.0) < MAX_SILENT_SHARE:
        signs.append("nearly only blanks are written")
    if dead_parts:
        signs.append(f"the gradients of {listed(f'`{part}`' for part in dead_parts)} are zero")
    if rate_sign:
        signs.append(rate_sign)
    yield planned.finding(
        "lr" if rate_sign else "model",
        problem=f"The clips are not learned ({description}): {', '.join(signs)}",
        fix=fix,
        stops=outcome == "failed",
    )


class Learner:
    """A second Brain of a planned run, with its initial weights, that trains on a few clips."""

    def __init__(self, planned: PlannedRun) -> None:
        setup = planned.plan_again({key: 0.0 for key in ZERO_KEYS if key in planned.document.root})
        self._hparams = setup.build_hparams()
        # Of this run alone, and before anything reads them
        dict.update(self._hparams, dict.fromkeys(self._hparams.keys() & NULL_OBJECTS))
        setup.load_initial_weights()
        self._brain = setup.make_brain(
            grad_accumulation_factor=1, compile=False, noprogressbar=True
        )
        loaders = planned.make_loaders()
        by_length = np.argsort(sample_counts(loaders.splits.train), kind="stable")
        shorter = by_length[: max(NUM_CLIPS, int(SHORTER_SHARE * len(by_length)))]
        rows = [int(shorter[index]) for index in spread_rows(len(shorter), NUM_CLIPS)]
        self._batch = loaders.train.collate_fn([loaders.train.dataset[row] for row in rows])
        self._brain.loaders = replace(loaders, measure=cast(Loader, [self._batch]))
        self._brain.on_fit_start()
        self._optimizers = [*(self._brain.optimizers_dict or {}).values()]
        self._highest_factor = highest_factor(read_schedule(planned.build_hparams()))
        self._num_clips = len(rows)
        self._seed = int(planned.knobs["seed"])
        state = self._brain.modules.state_dict()
        self._initial = {name: tensor.clone() for name, tensor in state.items()}

    def train(self, max_steps: int, factor: float = 1.0) -> list[float]:
        """Train from the initial weights at ``factor`` times the run's rate; return the losses.

        Training ends with NaN if the loss or the gradients of too many steps are not finite.
        """
        brain = self._brain
        brain.modules.load_state_dict(self._initial)
        for optimizer in self._optimizers:
            optimizer.state.clear()
        torch.manual_seed(self._seed)
        brain.optimizer_step = brain.nonfinite_count = 0
        brain.training_step.start_epoch(1)
        brain.on_stage_start(Stage.TRAIN, 1)
        losses: list[float] = []
        deadline = time.monotonic() + TRAINING_SECONDS
        while len(losses) < max_steps:
            warm_up = min(1.0, (len(losses) + 1) / WARM_UP_STEPS)
            set_rate(self._optimizers, factor * self._highest_factor * warm_up, None)
            brain.step = 1
            try:
                loss = as_loss(brain.fit_batch(self._batch))
            except SbkitError:
                return [*losses, math.nan]
            losses.append(float(loss.sums.sum() / loss.counts.sum().clamp(min=1e-9)))
            is_late = len(losses) >= MIN_STEPS and time.monotonic() > deadline
            if is_late or relative_fall(losses[-1], losses[0]) > FULL_FALL:
                break
        return losses

    def evaluate(self, losses: list[float]) -> tuple[dict[str, float], str]:
        """Return the metrics of the clips, and a description of the training."""
        brain = self._brain
        brain.on_stage_start(Stage.VALID, 1)
        brain.evaluate_splits({"clips": [self._batch]}, Stage.VALID, phase="valid")
        values = brain.evaluator.measure_splits()
        metrics = ", ".join(describe_values(brain.evaluator.metrics, values))
        return values, (
            f"{plural(self._num_clips, 'clip')} without masks or augmentation, "
            f"{plural(len(losses), 'step')}, loss {losses[0]:.3g} -> {losses[-1]:.3g}, {metrics}"
        )

    def sweep(self, losses: list[float]) -> tuple[str, str]:
        """Try other rates; return how far the run's rate is from a better one, and what to try.

        Both are empty if no other rate is clearly better. ``losses`` are those at the run's rate.
        """
        num_steps = max(MIN_SWEPT_STEPS, min(MAX_SWEPT_STEPS, len(losses) // len(SWEPT_FACTORS)))
        swept = {factor: self.train(num_steps, factor)[-1] for factor in SWEPT_FACTORS}
        own_loss = losses[:num_steps][-1]
        factor = find_better_factor(swept, own_loss)
        if factor is None:
            return "", ""
        rate = self._optimizers[0].defaults["lr"]
        return f"the learning rate is {describe_ratio(1 / factor)}", (
            f"Try `lr: {factor * rate:.2g}`, which takes the loss to {swept[factor]:.3g} in "
            f"{plural(num_steps, 'step')}, where this rate takes it to {own_loss:.3g}."
        )

    def parts_without_gradient(self) -> list[str]:
        """Name the parts of the model all of whose gradients are zero now."""
        brain = self._brain
        brain.training_step.train_mode()
        brain.on_stage_start(Stage.TRAIN, 1)
        loss = training_loss(brain, brain.to_device(self._batch))
        torch.autograd.backward(loss.sums.sum())
        unused = unused_parameters(brain)
        parts: dict[str, bool] = {}
        for name, p in named_parameters(brain.modules, self._hparams).items():
            if p.requires_grad and id(p) not in unused:
                part = name.partition(".")[0]
                parts[part] = parts.get(part, False) or (p.grad is not None and bool(p.grad.any()))
        brain.modules.zero_grad(set_to_none=True)
        return [part for part, has_gradient in parts.items() if not has_gradient]


def relative_fall(loss: float, first: float) -> float:
    """Return how far a loss is below the first, as a share of the size of the first.

    >>> relative_fall(1.0, 4.0), relative_fall(-6.0, -4.0)
    (0.75, 0.5)
    """
    return (first - loss) / max(abs(first), 1e-9)


def find_better_factor(swept: Mapping[float, float], own_loss: float) -> float | None:
    """Return the lowest factor of the rate with a good loss; None if none is clearly better."""
    finite = {factor: loss for factor, loss in swept.items() if math.isfinite(loss)}
    best_loss = min(finite.values(), default=math.inf)
    is_better = math.isnan(own_loss) or relative_fall(best_loss, own_loss) > MIN_BETTER_FALL
    good = [f for f, loss in finite.items() if relative_fall(loss, best_loss) >= -MAX_GOOD_RISE]
    return min(good, default=None) if is_better else None


def check_causes(planned: PlannedRun) -> Iterator[Finding]:
    """Name the causes that training would name later, if they are evident before it."""
    brain = planned.make_cpu_brain()
    planned.make_optimizers()
    brain.loaders = planned.make_loaders()
    for cause in brain.likely_causes():
        if cause.is_evident:
            yield planned.finding(cause.key, problem=cause.problem, fix=cause.fix, stops=False)
