"""What in the settings or the data keeps a recognizer from learning to write."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from sbkit.audio.augment import SpecAugment
from sbkit.audio.random_draws import seeded_draws
from sbkit.base.arrays import Float64s
from sbkit.base.units import samples_to_seconds
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.data.splits import Transcripts, read_transcripts
from sbkit.text.tokenizer import TOKENIZER_FILE
from sbkit.train.schedule import highest_factor, read_schedule

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
