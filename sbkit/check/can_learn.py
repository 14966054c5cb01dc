"""What keeps a recognizer from learning, and a trial on eight clips (`sbkit check --learn`)."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from speechbrain import Stage

from sbkit.audio.augment import SpecAugment
from sbkit.audio.random_draws import seeded_draws
from sbkit.base.arrays import Float64s
from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.check.checked_run import CheckedRun, Finding, LearningTest
from sbkit.check.dry_run import begin_training, take_step
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.splits import Transcripts, read_transcripts, sample_counts, spread_rows
from sbkit.evaluate.wer import TOKENS_WRITTEN
from sbkit.evaluate.wer_report import MAX_SILENT_SHARE
from sbkit.logs.handlers import quiet
from sbkit.logs.metric import describe_values
from sbkit.text.tokenizer import TOKENIZER_FILE
from sbkit.train.schedule import highest_factor, read_schedule, set_rate
from sbkit.train.setup import build_again, load_initial_weights, make_brain

# The lowest, usual and highest peak rates of a kind of Adam. In hparams/ they are 0.0008 to 0.0025;
# at 1.0, ctc.yaml writes only blanks.
SCRATCH_RATES = (5e-5, 1e-3, 0.02)
TUNING_RATES = (1e-6, 1e-4, 0.02)  # of weights that were trained before
MAX_MASKED_SHARE = 0.8  # of the features; in hparams/ at most half
MASKED_CLIPS, MASKED_FRAMES = 64, 1000  # to measure that share
MAX_DROPOUT = 0.5  # with more, a model that fits the clips may still write nothing
# Mean uses of a token in the training transcripts, for a vocabulary that is not of characters.
# A character of ctc.yaml has 480; each of 5,000 tokens would have at most 2.7.
MIN_TOKEN_USES, MIN_LARGE_VOCABULARY = 5.0, 200
# Between the logarithms of a clip's length and of its transcript's: at least 0.92 in the splits of
# five default corpora. Once shuffled it is 0, and 0.3 without the clips that CTC cannot align.
MIN_LENGTH_CORRELATION = 0.4
MIN_COMPARED_CLIPS, MIN_LENGTH_DEVIATION = 50, 0.25

# -- the causes ------------------------------------------------------------------------------------


def check_causes(run: CheckedRun) -> Iterator[Finding]:
    """Note what in the settings or the data keeps a recognizer from learning to write."""
    if run.data.recipe.label_file != TOKENIZER_FILE:
        return
    settings = dict(run.own.hparams.items())  # marks no key as read
    yield from _check_transcripts(run, settings)
    yield from _check_rate(run, settings)
    share = masked_share(settings)
    if share > MAX_MASKED_SHARE:
        probabilities = _mask_probabilities(settings)
        names = [*probabilities] or ["time_masks", "freq_masks"]
        yield run.note(
            next(iter(probabilities), "spec_augment"),
            problem=f"The masks of training hide {share:.0%} of the features",
            fix=f"Try {' and '.join(f'`{name}: 0`' for name in names)}.",
        )
    dropout = settings.get("dropout")
    if isinstance(dropout, int | float) and dropout > MAX_DROPOUT:  # or a layer of one's own YAML
        problem = f"Dropout hides {dropout:.0%} of the model"
        yield run.note("dropout", problem=problem, fix="Lower `dropout`.")


def _check_transcripts(run: CheckedRun, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge whether transcripts belong to their clips, and whether each token is seen often."""
    tokenizer = settings["tokenizer"]
    train = read_transcripts(run.own.loaders.splits.train, tokenizer)
    correlation = length_correlation(train)
    if correlation is not None and correlation < MIN_LENGTH_CORRELATION:
        yield run.note(
            "data_folder",
            problem="The transcripts do not seem to belong to their clips, by their lengths "
            f"(correlation {correlation:.2f})",
            fix="Compare some of them in data_report.html.",
        )
    uses = train.tokens.sum() / tokenizer.vocab_size
    is_large = tokenizer.kind != "char" and tokenizer.vocab_size >= MIN_LARGE_VOCABULARY
    if uses < MIN_TOKEN_USES and is_large:
        hours = samples_to_seconds(int(train.samples.sum()), settings["sample_rate"]) / 3600
        yield run.note(
            "token_type",
            problem=f"The vocabulary of {tokenizer.vocab_size:,} tokens is large for {hours:.1f} "
            f"hours: a token is seen {uses:.1f} times on average",
            fix="Try `token_type: char` with `vocab_size: null`, in another `output_folder`.",
        )


def _check_rate(run: CheckedRun, settings: Mapping[str, Any]) -> Iterator[Finding]:
    rate = settings.get("lr")
    names = [type(optimizer).__name__.lower() for optimizer in run.optimizers]
    if not isinstance(rate, int | float) or not names or "adam" not in names[0]:
        return
    is_tuned = bool(settings.get("init_from") or settings.get("pretrained"))
    lowest, usual, highest = TUNING_RATES if is_tuned else SCRATCH_RATES
    factor = highest_factor(read_schedule(settings))
    peak = rate * factor
    if not lowest <= peak <= highest:
        ratio = max(peak / usual, usual / max(peak, 1e-9))
        yield run.note(
            "lr",
            problem=f"The peak learning rate of {peak:g} is about {ratio:,.0f} times too "
            f"{'high' if peak > usual else 'low'}",
            fix=f"Try `lr: {usual / factor:g}`.",
        )


def masked_share(settings: Mapping[str, Any]) -> float:
    """Return the share of an utterance's features that the masks of sbkit hide in training."""
    if probabilities := _mask_probabilities(settings):  # overlapping masks count twice in these
        return 1 - math.exp(-sum(probabilities.values()))
    augment = settings.get("spec_augment")
    if not isinstance(augment, SpecAugment):
        return 0.0
    num_features = settings.get("n_mels", 80)  # a YAML of one's own may not name it
    features = torch.arange(MASKED_FRAMES * num_features).double().view(1, MASKED_FRAMES, -1)
    with seeded_draws([str(index) for index in range(MASKED_CLIPS)]):
        masked = augment(features, torch.full((MASKED_CLIPS,), MASKED_FRAMES))
    return float((masked != features).double().mean())


def _mask_probabilities(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the probabilities of masks of a pretrained encoder that a YAML declares."""
    values = {name: settings.get(name) for name in ("mask_time_prob", "mask_channel_prob")}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def length_correlation(transcripts: Transcripts) -> float | None:
    """Correlate the logarithms of audio and text lengths; None for few clips, or of one length."""
    is_filled = transcripts.characters > 0
    if is_filled.sum() < MIN_COMPARED_CLIPS:
        return None
    audio: Float64s = np.log(transcripts.samples[is_filled])
    text: Float64s = np.log(transcripts.characters[is_filled])
    if min(audio.std(), text.std()) < MIN_LENGTH_DEVIATION:
        return None
    return float(np.corrcoef(audio, text)[0, 1])


# -- a trial on eight clips ------------------------------------------------------------------------
#
# Masks and augmentation are off, and dropout is on. The rate is the highest of the schedule, after
# a short warm-up. (A sweep of rates named one at which eight clips are learned, but no whole run.)

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


def check_learning(run: CheckedRun) -> Iterator[Finding]:
    """Report a model that does not learn a few clips, the signs, and what to try."""
    with preserve_rng(run.own.placement.device), quiet():
        learner = Learner(run)
        losses = learner.train()
        values, description = learner.evaluate(losses)
    fall = relative_fall(losses[-1], losses[0])
    is_learned = fall >= MIN_LEARNED_FALL
    if "CER" in values:
        is_learned = values["CER"] <= MAX_LEARNED_CER
    is_flat = not fall > MIN_FALL  # also if it is NaN
    causes = [] if is_learned else [*check_causes(run)]
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
    run.measured.learning = LearningTest(
        outcome=outcome, description=description, losses=losses, values=values
    )
    if is_learned:
        return
    sign = "the loss does not fall" if is_flat else "the loss falls"
    if values.get(TOKENS_WRITTEN, 1.0) < MAX_SILENT_SHARE:
        sign += ", nearly only blanks are written"
    yield Finding(
        where=causes[0].where if causes else run.spec.place("model"),
        problem=f"The clips are not learned ({description}): {sign}",
        fix=fix,
        stops=outcome == "failed",
    )


class Learner:
    """A second Brain of a checked run, with its initial weights, that trains on a few clips."""

    def __init__(self, run: CheckedRun) -> None:
        self._run = run
        root = run.spec.document.root
        setup = build_again(run.own, **{key: 0.0 for key in ZERO_KEYS if key in root})
        nulls = dict.fromkeys(setup.hparams.keys() & NULL_OBJECTS)
        setup = replace(setup, hparams=setup.hparams.with_values(nulls))
        load_initial_weights(setup)
        self._brain = make_brain(setup, grad_accumulation_factor=1, compile=False)
        loaders = setup.loaders
        by_length = np.argsort(sample_counts(loaders.splits.train), kind="stable")
        shorter = by_length[: max(NUM_CLIPS, int(SHORTER_SHARE * len(by_length)))]
        rows = [int(shorter[index]) for index in spread_rows(len(shorter), NUM_CLIPS)]
        self._batch = loaders.train.collate_fn([loaders.train.dataset[row] for row in rows])
        begin_training(self._brain, loaders, self._batch)
        self._num_clips = len(rows)

    def train(self) -> list[float]:
        """Train, and return the losses; NaN ends them if too many steps are not finite."""
        brain = self._brain
        optimizers = [*(brain.optimizers_dict or {}).values()]
        highest = self._run.highest_factor
        torch.manual_seed(int(self._run.spec.settings["seed"]))
        losses: list[float] = []
        deadline = time.monotonic() + TRAINING_SECONDS
        while len(losses) < MAX_STEPS:
            warm_up = min(1.0, (len(losses) + 1) / WARM_UP_STEPS)
            set_rate(optimizers, highest * warm_up, None)
            try:
                loss = take_step(brain, self._batch)
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
