"""`sbkit check --learn`: overfit eight clips with the run's own model, optimizer and device.

Masks and augmentation are off, and dropout is on. The rate is the highest of the schedule, after a
short warm-up. If the clips are not learned, a short sweep tries other rates. Recognizers must write
the clips; for any other Brain, the loss on the clips must fall.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from speechbrain import Stage

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed, plural
from sbkit.check.dry_run import completed_dry_run
from sbkit.check.planned_run import Finding, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.batch import Loader, Loaders
from sbkit.data.shard import Row
from sbkit.data.splits import read_column, sample_counts
from sbkit.evaluate.wer import TOKENS_WRITTEN
from sbkit.logs.handlers import quiet
from sbkit.logs.metric import describe_values
from sbkit.train.advice import MAX_SILENT_TOKENS
from sbkit.train.optimizers import named_parameters
from sbkit.train.schedule import highest_factor, read_schedule
from sbkit.train.step import as_loss, as_losses

LEARN_STEP = "learn"  # the name of this step among a planned run's results
NUM_CLIPS = 8
LENGTH_QUANTILES = (0.2, 0.6)  # of the clips' lengths: long clips would take longer
TRAINING_SECONDS, SWEEP_SECONDS = 40.0, 25.0
MIN_STEPS, MAX_STEPS = 20, 500
MIN_SWEEP_STEPS, MAX_SWEEP_STEPS = 8, 30
TIMED_STEPS = 4  # the first of them is not counted
WARM_UP_STEPS = 10
SWEPT_FACTORS = (1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3)  # of the run's own rate
MAX_LEARNED_CER, MAX_UNFINISHED_CER = 0.2, 0.7
MAX_LEARNED_SHARE = 0.8  # of the first loss, for a recipe without CER
MIN_FLAT_SHARE = 0.97  # of the first loss
LEARNED_LOSS_SHARE = 0.02  # of the first loss; training then stops early
MAX_BETTER_SHARE = 0.7  # of the loss at the run's own rate, for another rate to be better
GOOD_LOSS_SHARE = 1.1  # of the best loss of a sweep; the lowest such rate is suggested
AUGMENTATIONS = ("spec_augment", "wave_augment")
OFF = ("mask_time_prob", "mask_channel_prob", "ema_decay")  # keys that are overridden by 0


@dataclass(frozen=True, kw_only=True)
class LearningTest:
    """What training on a few clips came to.

    losses: the training loss of each step; values: the metrics of the clips afterwards, in the
    words `description`; dead_parts: parts of the model whose gradients are zero.
    """

    num_clips: int
    rate: float
    losses: list[float]
    values: dict[str, float]
    description: str
    dead_parts: list[str]

    @property
    def is_passed(self) -> bool:
        if self.dead_parts:
            return False
        if "CER" in self.values:
            return self.values["CER"] <= MAX_LEARNED_CER
        return self.losses[-1] <= MAX_LEARNED_SHARE * self.losses[0]

    @property
    def is_unfinished(self) -> bool:
        """Whether text is learned, if too slowly for the time."""
        is_learning = not self.is_flat and not self.dead_parts
        return is_learning and self.values.get("CER", 1.0) <= MAX_UNFINISHED_CER

    @property
    def outcome(self) -> str:
        if self.is_passed:
            return "passed"
        return "unfinished" if self.is_unfinished else "failed"

    @property
    def is_flat(self) -> bool:
        return not self.losses[-1] < MIN_FLAT_SHARE * self.losses[0]  # also if it is NaN

    def signs(self) -> list[str]:
        """Describe what training came to."""
        signs = ["the loss does not fall" if self.is_flat else "the loss falls"]
        if self.values.get(TOKENS_WRITTEN, 1.0) < MAX_SILENT_TOKENS:
            signs.append("nearly nothing is written")
        if self.dead_parts:
            names = listed(f"`{part}`" for part in self.dead_parts)
            signs.append(f"the gradients of {names} are zero")
        return signs

    def as_record(self) -> dict[str, object]:
        return {"outcome": self.outcome, "rate": self.rate, "losses": self.losses, **self.values}

    def __str__(self) -> str:
        return (
            f"{plural(self.num_clips, 'clip')} without masks or augmentation, "
            f"{plural(len(self.losses), 'step')} at a rate of {self.rate:.3g}, loss "
            f"{self.losses[0]:.3g} -> {self.losses[-1]:.3g}, {self.description}"
        )


def check_learning(planned: PlannedRun) -> Iterator[Finding]:
    """Report a model that does not learn a few clips, what was seen, and what to try."""
    completed_dry_run(planned)
    with preserve_rng(planned.choose_placement().device), quiet():
        learner = Learner(planned)
        test = learner.test()
        planned.results[LEARN_STEP] = test
        loss_by_factor = learner.sweep(test) if test.outcome == "failed" else {}
    if test.is_passed:
        return
    if test.is_unfinished:
        yield planned.finding(
            "model",
            problem=f"The clips are being learned, but not within the time ({test})",
            fix="Repeat this on the device that will train.",
            stops=False,
        )
        return
    own_loss = loss_by_factor[1.0]
    best_loss = min(loss_by_factor.values())
    signs = test.signs()
    factor = 1.0
    if best_loss < MAX_BETTER_SHARE * own_loss:
        good = (f for f, loss in loss_by_factor.items() if loss <= GOOD_LOSS_SHARE * best_loss)
        factor = min(good)
    fix = "Try a smaller model, or one with fewer of your own parts, until the clips are learned."
    if factor != 1.0:
        direction = "low" if factor > 1 else "high"
        times = f"{max(factor, 1 / factor):,.0f} times too {direction}"
        signs.append(f"the learning rate is about {times}")
        fix = (
            f"Try --lr={learner.rate(factor):.2g}, which takes the loss to "
            f"{loss_by_factor[factor]:.3g} in {plural(learner.sweep_steps, 'step')}, where this "
            f"rate takes it to {own_loss:.3g}."
        )
    yield planned.finding(
        "lr" if factor != 1.0 else "model",
        problem=f"The clips are not learned ({test}): {'; '.join(signs)}",
        fix=fix,
    )


def check_causes(planned: PlannedRun) -> Iterator[Finding]:
    """Find what training names later, if the run does not learn, and what is evident before."""
    brain = planned.make_cpu_brain()
    planned.make_optimizers()
    brain.loaders = planned.make_loaders()
    for cause in brain.likely_causes():
        if cause.is_evident:
            problem, _, fix = cause.text.partition(": ")
            problem = f"The run is not likely to learn: {problem}"
            fix = f"{fix[:1].upper()}{fix[1:]}."
            yield planned.finding(cause.key, problem=problem, fix=fix, stops=False)


class HeldRate:
    """A schedule that stays at one factor of `lr`, which is set before each step."""

    factor = 1.0

    def __call__(self, progress: float) -> float:
        return self.factor


class Learner:
    """A second Brain of a planned run, with its initial weights, that trains on a few clips.

    sweep_steps: the steps at each rate of the sweep.
    """

    def __init__(self, planned: PlannedRun) -> None:
        run = planned.plan_again({key: 0.0 for key in OFF if planned.document.root.get(key)})
        self._hparams = hparams = run.build_hparams()
        run.load_initial_weights()
        self._held = HeldRate()
        self._peak = highest_factor(read_schedule(hparams))
        hparams.update(dict.fromkeys(hparams.keys() & {*AUGMENTATIONS}))
        if isinstance(hparams.get("lr"), float):  # else the recipe sets its own rates
            hparams["lr_schedule"] = self._held
        options = {"grad_accumulation_factor": 1, "compile": False, "noprogressbar": True}
        self._brain = run.make_brain(**options)
        loaders = planned.make_loaders()
        clips = choose_clips(loaders)
        self._num_clips = len(clips)
        self._batch = loaders.train.collate_fn(clips)
        self._brain.loaders = replace(loaders, measure=cast(Loader, [self._batch]))
        self._brain.on_fit_start()
        self._seed = int(planned.knobs["seed"])
        state = self._brain.modules.state_dict()
        self._initial = {name: tensor.clone() for name, tensor in state.items()}
        self.sweep_steps = MAX_SWEEP_STEPS

    def test(self) -> LearningTest:
        """Train at the run's own rate for as many steps as fit into the time, and evaluate."""
        losses, seconds = self._train(TIMED_STEPS)
        num_steps = int(TRAINING_SECONDS / seconds)
        losses, _ = self._train(min(MAX_STEPS, max(MIN_STEPS, num_steps)))
        self.sweep_steps = int(SWEEP_SECONDS / len(SWEPT_FACTORS) / seconds)
        self.sweep_steps = min(MAX_SWEEP_STEPS, len(losses), max(MIN_SWEEP_STEPS, self.sweep_steps))
        brain = self._brain
        brain.on_stage_start(Stage.VALID, 1)
        brain.evaluate_splits({"clips": cast(Loader, [self._batch])}, Stage.VALID, phase="valid")
        values = brain.evaluator.measure_splits()
        return LearningTest(
            num_clips=self._num_clips,
            rate=self.rate(1.0),
            losses=losses,
            values=values,
            description=", ".join(describe_values(brain.evaluator.metrics, values)),
            dead_parts=self._parts_without_gradient(),
        )

    def rate(self, factor: float) -> float:
        """Return the rate that training would have with a factor of the declared one."""
        return factor * self._peak * float(self._hparams.get("lr", 1.0))

    def sweep(self, test: LearningTest) -> dict[float, float]:
        """Return the loss after `sweep_steps` with factors of the run's own rate."""
        losses = {1.0: test.losses[self.sweep_steps - 1]}
        if self._hparams.get("lr_schedule") is self._held:
            for factor in SWEPT_FACTORS:
                losses[factor] = self._train(self.sweep_steps, factor)[0][-1]
        return {factor: loss if loss == loss else math.inf for factor, loss in losses.items()}

    def _train(self, num_steps: int, factor: float = 1.0) -> tuple[list[float], float]:
        """Train from the initial weights; return the loss of each step, and the seconds of one.

        A run that skips too many steps, whose gradients are not finite, ends with NaN.
        """
        brain = self._brain
        brain.modules.load_state_dict(self._initial)
        for optimizer in (brain.optimizers_dict or {}).values():
            optimizer.state.clear()
        torch.manual_seed(self._seed)
        brain.optimizer_step = brain.nonfinite_count = 0
        brain.training_step.start_epoch(1)
        brain.on_stage_start(Stage.TRAIN, 1)
        losses: list[float] = []
        started = time.perf_counter()
        for index in range(num_steps):
            if index == 1:
                started = time.perf_counter()
            self._held.factor = self._peak * factor * min(1.0, (index + 1) / WARM_UP_STEPS)
            brain.step = 1
            try:
                loss = as_loss(brain.fit_batch(self._batch))
            except SbkitError:
                losses.append(math.nan)
                break
            losses.append(float(loss.sums.sum() / loss.counts.sum().clamp(min=1e-9)))
            if losses[-1] < LEARNED_LOSS_SHARE * losses[0]:
                break
        return losses, (time.perf_counter() - started) / max(len(losses) - 1, 1)

    def _parts_without_gradient(self) -> list[str]:
        """Name the parts of the model all of whose gradients are zero after training."""
        brain = self._brain
        brain.training_step.train_mode()
        outputs = brain.compute_forward(brain.to_device(self._batch), Stage.TRAIN)
        losses = as_losses(brain.compute_objectives(outputs, self._batch, Stage.TRAIN)).values()
        torch.autograd.backward(torch.stack([loss.sums.sum() for loss in losses]).sum())
        unused = {id(p) for module in brain.unused_modules for p in module.parameters()}
        has_gradient: dict[str, bool] = {}
        for name, parameter in named_parameters(brain.modules, self._hparams).items():
            if parameter.requires_grad and id(parameter) not in unused:
                part = name.partition(".")[0]
                learns = parameter.grad is not None and bool(parameter.grad.any())
                has_gradient[part] = has_gradient.get(part, False) or learns
        brain.modules.zero_grad(set_to_none=True)
        return [part for part, learns in has_gradient.items() if not learns]


def choose_clips(loaders: Loaders) -> list[Row]:
    """Return training clips of ordinary length that have a transcript, if there are transcripts."""
    train = loaders.splits.train
    rows = np.arange(len(train))
    if "text" in train.column_names and any(texts := read_column(train, "text")):
        rows = rows[[bool(text.strip()) for text in texts]]
    by_length = rows[np.argsort(sample_counts(train)[rows], kind="stable")]
    first, last = (int(quantile * (len(by_length) - 1)) for quantile in LENGTH_QUANTILES)
    last = min(len(by_length) - 1, max(last, first + NUM_CLIPS - 1))
    positions = np.linspace(first, last, min(NUM_CLIPS, len(by_length))).astype(int)
    return [loaders.train.dataset[int(row)] for row in by_length[np.unique(positions)]]
