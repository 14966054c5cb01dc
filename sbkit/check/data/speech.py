"""Checks of the data: rows left out, lengths, empty transcripts, and how fast is spoken."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby

import numpy as np
import numpy.typing as npt

from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.check.data.alignment import impossible_rows
from sbkit.check.data.audio_levels import check_levels
from sbkit.check.data.characters import check_rare, check_scripts
from sbkit.check.data.duplicates import (
    check_clips,
    check_duplicates,
    check_sentences,
    check_speakers,
)
from sbkit.check.data.utterances import TEXT, TRAIN, named, notice, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.columns import sample_counts
from sbkit.data.corpora.splits import Excluded
from sbkit.data.corpora.transcripts import Transcripts

MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
FENCE = 3.0  # times the middle half of all rates, above it: Tukey's "far out"
LONGER = (1.2, 0.5)  # times what a row says, and s more: not an encoder's padding
UNRELATED = 0.3  # correlation of text and audio lengths; the default corpus has 0.95
ENOUGH_ROWS = 30  # of train, to tell a correlation from chance

Rates = npt.NDArray[np.float64]


def check_speech(planned: PlannedRun) -> Iterator[Finding]:
    """Check what preparation left out, at every row, and at the audio of some."""
    checks: tuple[Callable[[PlannedRun], Iterator[Finding]], ...] = (
        _check_excluded,
        _check_limits,
        _check_durations,
        check_duplicates,
        check_clips,
        check_speakers,
        check_levels,
        *(_check_empty, check_sentences, check_scripts, check_rare, _check_pairs, _check_rates),
    )
    for check in checks:
        with suppress(MissingPartError):
            yield from check(planned)


def _check_excluded(planned: PlannedRun) -> Iterator[Finding]:
    excluded = sorted(planned.splits.excluded, key=lambda item: item.reason)
    for reason, found in groupby(excluded, key=lambda item: item.reason):
        yield from notice(
            planned,
            found=list(found),
            of_manifest=True,
            declared="every row of the data must be usable",
            effect=f"cannot be used ({reason})",
            fix="Repair these rows or clips, or take them out of the manifest.",
        )


def _check_limits(planned: PlannedRun) -> Iterator[Finding]:
    """Find limits that leave out much of train, and what is beyond them in the other splits."""
    shortest, longest = (planned.knobs.get(name) for name in ("min_seconds", "max_seconds"))
    if shortest is None or longest is None:
        return
    outside = planned.splits.out_of_range
    if len(outside) > MANY_OUTSIDE * (len(outside) + len(planned.splits.named()[TRAIN])):
        yield from notice(
            planned,
            "max_seconds",
            found=outside,
            of_manifest=True,
            declared=f"most of train should be {shortest:g} to {longest:g} s long",
            effect="are not, and are left out of it",
            fix="Widen `min_seconds` and `max_seconds`, or cut the clips.",
        )
    samples = {name: sample_counts(each) for name, each in planned.splits.evaluated().items()}
    rate = planned.knobs["sample_rate"]
    limit = seconds_to_samples(longest, rate)
    beyond = {name: np.flatnonzero(each > limit) for name, each in samples.items()}
    yield from notice(
        planned,
        "max_seconds",
        found=named(
            planned,
            beyond,
            "longer than what training takes",
            lambda split, row: f"{samples_to_seconds(int(samples[split][row]), rate):.2f} s",
        ),
        declared=f"an utterance should be no longer than those of train ({longest:g} s)",
        effect="are longer, and scored all the same",
        fix="Raise `max_seconds`, or cut the clips.",
    )


def _check_durations(planned: PlannedRun) -> Iterator[Finding]:
    """Find clips that are longer than their rows say: parts of files, which are read whole."""
    found = [
        Excluded(name, each, "longer than its row says", f"{seconds:.2f} s for {said}")
        for name, split in planned.splits.named().items()
        if "duration" in split.column_names
        for each, said, seconds in zip(
            split["id"][:],
            split["duration"][:],
            sample_counts(split) / planned.knobs["sample_rate"],
            strict=True,
        )
        if (said or "").replace(".", "", 1).isdecimal()
        and seconds > LONGER[0] * float(said) + LONGER[1]
    ]
    yield from notice(
        planned,
        found=found,
        declared="a clip must be as long as its row says (the column `duration`, in seconds)",
        effect="are longer, and read whole",
        fix="Cut the audio, since no parts of files are read, or correct the column.",
    )


def _check_empty(planned: PlannedRun) -> Iterator[Finding]:
    empty = {
        name: np.flatnonzero(each.characters == 0) for name, each in transcripts_of(planned).items()
    }
    yield from notice(
        planned,
        found=named(planned, empty, "empty transcript"),
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
    """Find transcripts that nobody can have said in the time, but those that CTC cannot align."""
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
        found=named(
            planned,
            too_fast,
            "too fast",
            lambda split, row: f"{rates[split][row]:.1f} characters a second",
        ),
        declared=f"speech must be about as fast as most of train ({usual} characters a second)",
        effect=f"have more than {fence:.0f} characters a second",
        fix="Correct the transcripts, or the clips that end early.",
    )


def _rates(transcripts: Transcripts, sample_rate: int) -> Rates:
    rates: Rates = transcripts.characters * sample_rate / np.maximum(1, transcripts.samples)
    return rates
