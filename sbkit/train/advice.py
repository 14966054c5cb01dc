"""Advice for a recognizer that does not learn: its signs in a validation, and the likely causes.

The signs are nearly only blanks, only errors, or a loss that has not moved. The causes are read
from the run itself: its learning rate, masks, batches, vocabulary and transcripts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sbkit.audio.draws import seeded_draws
from sbkit.base.arrays import Float64s
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.data.splits import Transcripts
from sbkit.evaluate.wer import BLANK_FRAMES, TOKENS_WRITTEN

# hparams/ctc.yaml with its 28 characters and batches of 32 s writes only blanks at step 85 and 27 %
# of the tokens at step 127; from scratch, hparams/ctc_pretrained.yaml writes only blanks at step
# 160, and has learned by step 450.
EARLY_STEPS = 100  # enough if the loss has not moved, or if a cause is evident
LATE_STEPS = 450  # enough for a vocabulary of `FEW_TOKENS`, and more for a larger one
FEW_TOKENS = 32
MAX_SILENT_TOKENS = 0.05  # written tokens per token of the transcripts
MIN_FAILED_CER = 0.95
MIN_RANDOM_CER = 0.7  # of untrained weights: 0.88 and 1.21 in two models
# Of the loss of the first steps. At a rate of 1e-6 it is 1.03 after two epochs of ctc.yaml, at the
# default rate 0.59.
MIN_UNMOVED_SHARE = 0.97

# Peak rates of AdamW in hparams/ are 0.0008 to 0.0025; at 1.0, ctc.yaml writes only blanks.
LOWEST_RATE, USUAL_RATE, HIGHEST_RATE = 5e-5, 1e-3, 0.02
LOWEST_TUNING_RATE = 1e-6  # of weights that were trained before
MAX_MASKED_SHARE = 0.8  # of the features; in hparams/ at most half
MASKED_CLIPS = 64  # to measure that share
# Mean uses of a token in the training transcripts, for a vocabulary that is not of characters.
# A character of ctc.yaml has 480; each of 5,000 tokens would have at most 2.7.
MIN_TOKEN_USES, MIN_LARGE_VOCABULARY = 5.0, 200
# Between the logarithms of a clip's length and of its transcript's: at least 0.92 in the splits of
# five default corpora. Once shuffled it is 0, and 0.3 without the clips that CTC cannot align.
MIN_LENGTH_CORRELATION = 0.5
MIN_COMPARED_CLIPS, MIN_LENGTH_DEVIATION = 50, 0.25
MIN_STEPS_PER_EPOCH = 20
MAX_CAUSES = 3
MIN_CAUSES = 2


@dataclass(frozen=True)
class Cause:
    """A likely cause: its key, a sentence without its period, and whether the run shows it."""

    key: str
    text: str
    is_evident: bool


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that `find_causes` reads.

    knobs: the built values of its YAML.
    train: the transcripts of the training set; None if the labels are no text.
    optimizer: None before it is made.
    progress: share of the run so far.
    steps_per_epoch: None if unknown.
    """

    knobs: Mapping[str, Any]
    train: Transcripts | None = None
    optimizer: Optimizer | None = None
    progress: float = 1.0
    steps_per_epoch: int | None = None

    @property
    def vocab_size(self) -> int:
        return int(getattr(self.knobs.get("tokenizer"), "vocab_size", FEW_TOKENS))

    @property
    def has_large_vocabulary(self) -> bool:
        """Whether there are many tokens, some of them longer than a character."""
        texts = getattr(self.knobs.get("tokenizer"), "texts", ())
        return len(texts) >= MIN_LARGE_VOCABULARY and any(len(text) > 1 for text in texts)


def advise_recognizer(
    values: Mapping[str, float],
    *,
    step: int,
    first_loss: float,
    epoch_loss: float,
    read_facts: Callable[[], RunFacts],
) -> str | None:
    """Return advice if a validation shows that a recognizer does not learn.

    Args:
        values: the metrics of the validation.
        step: optimizer steps so far.
        first_loss: mean training loss of the first steps.
        epoch_loss: mean training loss of the last epoch.
        read_facts: reads facts about the run, if they are needed: a large corpus takes seconds.
    """
    blanks, written, cer = values[BLANK_FRAMES], values[TOKENS_WRITTEN], values["CER"]
    is_silent = written < MAX_SILENT_TOKENS
    has_moved = not epoch_loss > MIN_UNMOVED_SHARE * first_loss
    min_failed_cer = MIN_FAILED_CER if has_moved else MIN_RANDOM_CER
    if step < EARLY_STEPS or not (is_silent or cer >= min_failed_cer):
        return None
    facts = read_facts()
    causes = find_causes(facts)
    late_steps = LATE_STEPS * math.sqrt(max(1.0, facts.vocab_size / FEW_TOKENS))
    is_early = step < late_steps and not any(cause.is_evident for cause in causes)
    if is_early and has_moved:
        return None
    signs = f"CER {cer:.0%}"
    if is_silent:
        signs = (
            f"greedy decoding writes {written:.1%} of the tokens, with {blanks:.1%} blank frames"
        )
    if not has_moved:
        signs += f"; the training loss has not fallen ({first_loss:.3g}, now {epoch_loss:.3g})"
    return (
        f"advice: after {plural(step, 'step')} this run has not learned to write: {signs}. "
        f"{describe_causes(causes)}. `sbkit check YAML --learn` tries the model on eight clips."
    )


def describe_causes(causes: list[Cause]) -> str:
    """Write the evident causes, and others up to two."""
    evident = [cause.text for cause in causes if cause.is_evident][:MAX_CAUSES]
    others = [cause.text for cause in causes if not cause.is_evident]
    texts = evident + others[: max(0, MIN_CAUSES - len(evident))]
    return "Likely causes: " + "; ".join(f"({n}) {text}" for n, text in enumerate(texts, start=1))


def find_causes(facts: RunFacts) -> list[Cause]:
    """Return what may keep a recognizer from learning, the most likely cause first."""
    causes = [
        *_transcript_causes(facts),
        *_rate_causes(facts),
        *_mask_causes(facts.knobs),
        *_step_causes(facts),
    ]
    return sorted(causes, key=lambda cause: not cause.is_evident)


def _rate_causes(facts: RunFacts) -> list[Cause]:
    """Judge the peak rate if the optimizer is a kind of Adam, and the position in the warm-up."""
    knobs = facts.knobs
    rate = knobs.get("lr")
    if not isinstance(rate, int | float) or facts.optimizer is None:
        return []
    causes = []
    is_tuned = bool(knobs.get("init_from") or knobs.get("pretrained"))
    lowest = LOWEST_TUNING_RATE if is_tuned else LOWEST_RATE
    is_adam = "adam" in type(facts.optimizer).__name__.lower()
    if is_adam and rate > HIGHEST_RATE:
        text = f"`lr` of {rate:g} is about {rate / USUAL_RATE:,.0f} times too high"
    elif is_adam and rate < lowest:
        text = f"`lr` of {rate:g} is about {USUAL_RATE / rate:,.0f} times too low"
    else:
        text = f"`lr` of {rate:g} may not suit this model"
    is_evident = is_adam and not lowest <= rate <= HIGHEST_RATE
    suggested = USUAL_RATE if is_evident else rate / 3
    causes.append(Cause("lr", f"{text}: try --lr={suggested:.2g}", is_evident))
    if facts.progress < knobs.get("warmup_fraction", 0) and rate <= HIGHEST_RATE:
        rate_now = max(group["lr"] for group in facts.optimizer.param_groups)
        text = f"the warm-up has only reached a rate of {rate_now:.2g}: lower --warmup_fraction"
        causes.append(Cause("warmup_fraction", text, is_evident=False))
    return causes


def _mask_causes(knobs: Mapping[str, Any]) -> list[Cause]:
    share = masked_share(knobs)
    if share is None:
        return []
    text = f"the masks of training hide {share:.0%} of the features"
    key = "spec_augment"
    options = "--time_masks=0 --freq_masks=0"
    if "mask_time_prob" in knobs:
        key = "mask_time_prob"
        options = "--mask_time_prob=0 --mask_channel_prob=0"
    is_evident = share > MAX_MASKED_SHARE
    return [Cause(key, f"{text}: try {options}", is_evident)] if share else []


def masked_share(knobs: Mapping[str, Any]) -> float | None:
    """Measure the share of an utterance's features that training masks; None if it is unknown.

    The masks of `spec_augment` are applied to random features of ten seconds.
    """
    if "mask_time_prob" in knobs:
        shares = [float(knobs.get(f"mask_{axis}_prob", 0)) for axis in ("time", "channel")]
        return 1 - (1 - min(shares[0], 1)) * (1 - min(shares[1], 1))
    augment, bins = knobs.get("spec_augment"), knobs.get("n_mels")
    if not callable(augment) or not isinstance(bins, int):
        return None
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(MASKED_CLIPS, 1000, bins, generator=generator)
    lengths = torch.full((MASKED_CLIPS,), 1000)
    try:
        with seeded_draws([str(index) for index in range(MASKED_CLIPS)]), torch.no_grad():
            masked = augment(features.clone(), lengths)
    except Exception:  # a user's augmentation may need other arguments
        return None
    if not isinstance(masked, Tensor) or masked.shape != features.shape:
        return None
    return float((masked != features).float().mean())


def _transcript_causes(facts: RunFacts) -> list[Cause]:
    """Judge whether transcripts belong to their clips, and whether each token is seen often."""
    if facts.train is None:
        return []
    causes = []
    correlation = length_correlation(facts.train)
    if correlation is not None and correlation < MIN_LENGTH_CORRELATION:
        text = (
            "the transcripts do not seem to belong to their clips, since their lengths do not grow "
            f"with the audio (correlation {correlation:.2f}): compare some in data_report.html"
        )
        causes.append(Cause("data_folder", text, is_evident=True))
    uses = facts.train.labels.sum() / facts.vocab_size
    rate = facts.knobs.get("sample_rate")
    if uses < MIN_TOKEN_USES and facts.has_large_vocabulary and rate:
        hours = samples_to_seconds(int(facts.train.samples.sum()), rate) / 3600
        text = (
            f"the vocabulary of {facts.vocab_size:,} tokens is large for {hours:.1f} hours (a "
            f"token is seen {uses:.1f} times on average): try --token_type=char --vocab_size=null "
            "and another --output_folder"
        )
        causes.append(Cause("token_type", text, is_evident=True))
    return causes


def length_correlation(transcripts: Transcripts) -> float | None:
    """Correlate the logarithms of audio and text lengths; None if that says nothing.

    It says nothing about few clips, or clips of nearly one length.
    """
    is_filled = transcripts.characters > 0
    if is_filled.sum() < MIN_COMPARED_CLIPS:
        return None
    audio: Float64s = np.log(transcripts.samples[is_filled])
    text: Float64s = np.log(transcripts.characters[is_filled])
    if min(audio.std(), text.std()) < MIN_LENGTH_DEVIATION:
        return None
    return float(np.corrcoef(audio, text)[0, 1])


def _step_causes(facts: RunFacts) -> list[Cause]:
    causes = []
    count, seconds = facts.steps_per_epoch, facts.knobs.get("batch_seconds")
    if count and count < MIN_STEPS_PER_EPOCH and seconds:
        text = f"an epoch has only {plural(count, 'step')}: lower --batch_seconds={seconds:g}"
        causes.append(Cause("batch_seconds", text, is_evident=False))
    return causes
