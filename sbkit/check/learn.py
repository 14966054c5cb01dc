"""`sbkit check --learn`: overfit eight clips with the run's own model, optimizer and device.

Masks and augmentation are off, and dropout is on. The rate is the highest of the schedule, after a
short warm-up. Recognizers must write the clips; for any other Brain, the loss on the clips must
fall. If the clips are not learned, the Brain's evident causes are named. (A sweep named a rate at
which the eight clips are learned; whole runs diverged at it.)
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from speechbrain import Stage

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.check.dry_run import completed_dry_run
from sbkit.check.planned_run import Finding, PlannedRun
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.batch import Loader
from sbkit.data.splits import sample_counts, spread_rows
from sbkit.evaluate.wer import TOKENS_WRITTEN
from sbkit.evaluate.wer_report import MAX_SILENT_SHARE
from sbkit.logs.handlers import quiet
from sbkit.logs.metric import describe_values
from sbkit.train.evaluation import Cause
from sbkit.train.schedule import highest_factor, read_schedule, set_rate
from sbkit.train.step import as_loss

LEARNING_TEST = "learn"  # the name of the test in `PlannedRun.results`
NUM_CLIPS = 8
SHORTER_SHARE = 0.6  # of the clips: long ones would take longer
TRAINING_SECONDS = 40.0
MIN_STEPS, MAX_STEPS = 20, 500
WARM_UP_STEPS = 10
MAX_LEARNED_CER = 0.2
MIN_LEARNED_FALL = 0.2  # of the first loss, for a recipe without CER
MIN_FALL = 0.03  # of the first loss; with less, it does not fall
FULL_FALL = 0.98  # of the first loss; training then stops early
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
        losses = learner.train()
        values, description = learner.evaluate(losses)
    fall = relative_fall(losses[-1], losses[0])
    is_learned = fall >= MIN_LEARNED_FALL
    if "CER" in values:
        is_learned = values["CER"] <= MAX_LEARNED_CER
    is_flat = not fall > MIN_FALL  # also if it is NaN
    causes = [] if is_learned else evident_causes(planned)
    outcome = "unfinished"
    fix = "The time was too short: repeat this on the device that will train."
    if is_learned:
        outcome = "passed"
    elif causes:
        outcome = "failed"
        fix = f"{causes[0].problem}. {causes[0].fix}"
    elif is_flat or len(losses) == MAX_STEPS:
        outcome = "failed"
        fix = "Try another `lr`, a smaller model, or one with fewer of your own parts."
    planned.results[LEARNING_TEST] = LearningTest(
        outcome=outcome, description=description, losses=losses, values=values
    )
    if is_learned:
        return
    sign = "the loss does not fall" if is_flat else "the loss falls"
    if values.get(TOKENS_WRITTEN, 1.0) < MAX_SILENT_SHARE:
        sign += ", nearly only blanks are written"
    yield planned.finding(
        causes[0].key if causes else "model",
        problem=f"The clips are not learned ({description}): {sign}",
        fix=fix,
        stops=outcome == "failed",
    )


class Learner:
    """A second Brain of a planned run, with its initial weights, that trains on a few clips."""

    def __init__(self, planned: PlannedRun) -> None:
        self._planned = planned
        setup = planned.plan_again({key: 0.0 for key in ZERO_KEYS if key in planned.document.root})
        hparams = setup.build_hparams()
        # Of this run alone, and before anything reads them
        dict.update(hparams, dict.fromkeys(hparams.keys() & NULL_OBJECTS))
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
        self._num_clips = len(rows)

    def train(self) -> list[float]:
        """Train, and return the losses.

        Training ends with NaN if the loss or the gradients of too many steps are not finite.
        """
        brain = self._brain
        optimizers = [*(brain.optimizers_dict or {}).values()]
        highest = highest_factor(read_schedule(self._planned.build_hparams()))
        torch.manual_seed(int(self._planned.knobs["seed"]))
        brain.training_step.start_epoch(1)
        brain.on_stage_start(Stage.TRAIN, 1)
        losses: list[float] = []
        deadline = time.monotonic() + TRAINING_SECONDS
        while len(losses) < MAX_STEPS:
            warm_up = min(1.0, (len(losses) + 1) / WARM_UP_STEPS)
            set_rate(optimizers, highest * warm_up, None)
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


def relative_fall(loss: float, first: float) -> float:
    """Return how far a loss is below the first, as a share of the size of the first.

    >>> relative_fall(1.0, 4.0), relative_fall(-6.0, -4.0)
    (0.75, 0.5)
    """
    return (first - loss) / max(abs(first), 1e-9)


def evident_causes(planned: PlannedRun) -> Sequence[Cause]:
    """Return what the settings or the data of the run show to keep it from learning."""
    brain = planned.make_cpu_brain()
    planned.make_optimizers()
    brain.loaders = planned.make_loaders()
    return [cause for cause in brain.likely_causes() if cause.is_evident]


def check_causes(planned: PlannedRun) -> Iterator[Finding]:
    """Name the causes that training would name later, if they are evident before it."""
    for cause in evident_causes(planned):
        yield planned.finding(cause.key, problem=cause.problem, fix=cause.fix, stops=False)
