"""Checks of the data: rows left out, lengths, levels, empty transcripts, and the speaking rate."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby

import numpy as np
import numpy.typing as npt
from torch import nn

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.audio.noise import FromFolder
from sbkit.base.text import listed, plural
from sbkit.check.data.alignment import impossible_rows
from sbkit.check.data.characters import check_characters
from sbkit.check.data.duplicates import check_duplicates
from sbkit.check.data.utterances import TEXT, TRAIN, Rows, notice, transcripts_of
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.columns import sample_counts
from sbkit.data.corpora.transcripts import Transcripts
from sbkit.data.report import measure_data
from sbkit.data.storage.audio_store import read_clips

MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
FENCE = 3.0  # times the middle half of all rates, above it: Tukey's "far out"
LONGER = (1.2, 0.5)  # times what a row says, and s more: not an encoder's padding
UNRELATED = 0.3  # correlation of text and audio lengths; the default corpus has 0.95
ENOUGH_ROWS = 30  # of train, to tell a correlation from chance
WITHIN_ONE_SPLIT = {"text": "sentence", "speaker": "speaker"}  # by column
SAMPLED = 500  # utterances of a split, evenly spread over it, whose audio is measured
WHICH = f"up to {SAMPLED} clips of each split were looked at"
SILENT = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale
TOP = 0.99 * FULL_SCALE
CLIPPED = 0.001  # share of samples at the top; the default corpus has none there

Rates = npt.NDArray[np.float64]


def check_speech(planned: PlannedRun) -> Iterator[Finding]:
    """Check what preparation left out, at every row, and at the audio of some."""
    checks: tuple[Callable[[PlannedRun], Iterator[Finding]], ...] = (
        *(_check_report, _check_limits, _check_durations, check_duplicates, check_levels),
        *(_check_empty, check_characters, _check_pairs, _check_rates),
    )
    for check in checks:
        with suppress(MissingPartError):
            yield from check(planned)


def _check_report(planned: PlannedRun) -> Iterator[Finding]:
    """Find what the report of the data says of rows left out, and of values in two splits."""
    splits = planned.splits
    language, rate = planned.knobs.get("language"), planned.knobs["sample_rate"]
    facts = measure_data(splits, sample_rate=rate, language=language)
    excluded = sorted(splits.excluded, key=lambda item: item.reason)
    for reason, found in groupby(excluded, key=lambda item: item.reason):
        yield from notice(
            planned,
            found=list(found),
            declared="every row of the data must be usable",
            effect=f"cannot be used ({reason})",
            fix="Repair these rows or clips, or take them out of the manifest.",
        )
    for each in facts["shared"]:
        one, other = each["splits"]
        what = WITHIN_ONE_SPLIT.get(each["column"])
        only_one = what == "speaker" and facts["speakers"] == 1  # whom no split can part
        if what and each["values"] and not only_one:
            yield planned.finding(
                "data",
                "data_folder",
                declared=f"a {what} must be in one split only: a score on what was trained on "
                "measures memory",
                effect=f"{each['values']:,} of {plural(each['of'], what)} in {other} "
                f"{'is' if each['values'] == 1 else 'are'} in {one}, too: "
                f"{listed(each['examples'], most=SHOWN)}",
                fix=f"Keep each {what} in one split.",
                stops=False,
            )


def _check_limits(planned: PlannedRun) -> Iterator[Finding]:
    """Find limits that leave out much of train."""
    shortest, longest = (planned.knobs.get(name) for name in ("min_seconds", "max_seconds"))
    if shortest is None or longest is None:
        return
    outside = planned.splits.out_of_range
    if len(outside) > MANY_OUTSIDE * (len(outside) + len(planned.splits.train)):
        yield from notice(
            planned,
            "max_seconds",
            found=outside,
            declared=f"most of train should be {shortest:g} to {longest:g} s long",
            effect="are not, and are left out of it",
            fix="Widen `min_seconds` and `max_seconds`, or cut the clips.",
        )


def _check_durations(planned: PlannedRun) -> Iterator[Finding]:
    """Find clips that are longer than their rows say: parts of files, which are read whole."""
    splits = {n: s for n, s in planned.splits.named().items() if "duration" in s.column_names}
    said = {name: [_number(each) for each in split["duration"]] for name, split in splits.items()}
    real = {n: sample_counts(s) / planned.knobs["sample_rate"] for n, s in splits.items()}
    yield from notice(
        planned,
        found={
            name: np.flatnonzero(real[name] > LONGER[0] * np.array(said[name]) + LONGER[1])
            for name in splits
        },
        reason="longer than its row says",
        detail=lambda split, row: f"{real[split][row]:.2f} s for {said[split][row]:g}",
        declared="a clip must be as long as its row says (the column `duration`, in seconds)",
        effect="are longer, and read whole",
        fix="Cut the audio, since no parts of files are read, or correct the column.",
    )


def _number(text: str | None) -> float:
    """Return a number; infinity for a text that is none."""
    return float(text) if text and text.replace(".", "", 1).isdecimal() else float("inf")


def check_levels(planned: PlannedRun) -> Iterator[Finding]:
    """Find silent clips, and clips that are cut at full scale, among some of each split."""
    silent: dict[str, Rows] = {}
    clipped: dict[str, Rows] = {}
    for name, split in planned.splits.named().items():
        rows = sampled_rows(len(split))
        levels = np.array([[*measure_levels(c)] for c in read_clips(split, rows.tolist())])
        peaks, at_top = levels.reshape(-1, 2).T
        silent[name], clipped[name] = rows[peaks < SILENT], rows[at_top > CLIPPED]
    yield from notice(
        planned,
        found=silent,
        reason="silent audio",
        declared="every clip must hold sound",
        effect=f"are silent ({WHICH})",
        fix="Record them again, or take them out.",
    )
    yield from notice(
        planned,
        found=clipped,
        reason="clipped audio",
        declared="every clip must stay below full scale",
        effect=f"are clipped ({WHICH})",
        fix="Record them again at a lower level, or take them out.",
    )


def sampled_rows(count: int) -> Rows:
    """Choose rows evenly spread over a split, always the same."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64))


def measure_levels(samples: Samples) -> tuple[float, float]:
    """Return the loudest sample of a clip, and the share of samples at full scale."""
    levels = np.abs(samples.astype(np.int32))
    return float(levels.max(initial=0)), float((levels >= TOP).sum() / max(1, len(levels)))


def _check_empty(planned: PlannedRun) -> Iterator[Finding]:
    empty = {
        name: np.flatnonzero(each.characters == 0) for name, each in transcripts_of(planned).items()
    }
    yield from notice(
        planned,
        found=empty,
        reason="empty transcript",
        declared=f"every utterance must have a transcript (the column `{TEXT}`, normalized)",
        effect="have none: each word recognized there counts as an error",
        fix="Write down what is said, or take the rows out.",
    )


def _check_pairs(planned: PlannedRun) -> Iterator[Finding]:
    """Find transcripts that are unrelated to their clips: longer audio has no longer text."""
    train = transcripts_of(planned)[TRAIN]
    if len(train.samples) < ENOUGH_ROWS or not (train.samples.std() and train.characters.std()):
        return
    correlation = float(np.corrcoef(train.samples, train.characters)[0, 1])
    if correlation < UNRELATED:
        yield planned.finding(
            "data",
            "data_folder",
            declared="longer clips of train must have longer transcripts",
            effect=f"the two lengths are hardly related (correlation {correlation:.2f})",
            fix="See whether each transcript belongs to its clip: rows may be shifted or shuffled.",
            stops=False,
        )


def _check_rates(planned: PlannedRun) -> Iterator[Finding]:
    """Find transcripts that are too long for their clips, but those that CTC cannot align."""
    transcripts = transcripts_of(planned)
    rate = planned.knobs["sample_rate"]
    rates = {name: _rates(each, rate) for name, each in transcripts.items()}
    lower, upper = np.percentile(rates[TRAIN], (25, 75))
    fence = upper + FENCE * (upper - lower)
    impossible = impossible_rows(planned)
    too_fast = {
        name: np.setdiff1d(np.flatnonzero(each > fence), impossible[name])
        for name, each in rates.items()
    }
    usual = f"{lower:.0f}" if round(lower) == round(upper) else f"{lower:.0f} to {upper:.0f}"
    yield from notice(
        planned,
        found=too_fast,
        reason="too fast",
        detail=lambda split, row: f"{rates[split][row]:.1f} characters a second",
        declared=f"speech must be about as fast as most of train ({usual} characters a second)",
        effect=f"have more than {fence:.0f} characters a second",
        fix="Correct the transcripts, or the clips that end early.",
    )


def _rates(transcripts: Transcripts, sample_rate: int) -> Rates:
    rates: Rates = transcripts.characters * sample_rate / np.maximum(1, transcripts.samples)
    return rates


def check_noises(planned: PlannedRun) -> Iterator[Finding]:
    """Find folders of so many files that only some are taken."""
    augment = planned.hparams.get("wave_augment")
    for part in augment.modules() if isinstance(augment, nn.Module) else ():
        if isinstance(part, FromFolder) and len(part.files) < part.found:
            yield planned.finding(
                "noises",
                "wave_augment",
                declared=f"the folder of {type(part).__name__} must be small enough to be kept on "
                "the device",
                effect=f"it has {part.found:,} audio files, of which {len(part.files):,} are "
                "taken, evenly",
                fix="Name a folder of fewer files, to choose them yourself.",
                stops=False,
            )
