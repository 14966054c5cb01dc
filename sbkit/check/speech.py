"""Whether the speech is whole: all there, written down, of a length, and as fast as speech."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby

import numpy as np
import numpy.typing as npt

from sbkit.base.units import SAMPLE_RATE, samples_to_seconds, seconds_to_samples
from sbkit.check.alignment import impossible_rows
from sbkit.check.audio_levels import check_levels
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.check.split_overlap import check_sentences, check_speakers
from sbkit.check.utterances import Rows, named, notice, transcripts_of
from sbkit.data.splits import Excluded

MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
FENCE = 3.0  # times the middle half of all rates, above it: Tukey's "far out"


def check_speech(planned: PlannedRun) -> Iterator[Finding]:
    """Look at what preparation left out, at every row, and at the audio of some."""
    checks: tuple[Callable[[PlannedRun], Iterator[Finding]], ...] = (
        _check_left_out,
        _check_limits,
        _check_empty,
        check_sentences,
        check_speakers,
        check_levels,
        _check_rates,
    )
    for check in checks:
        with suppress(MissingPartError):
            yield from check(planned)


def _check_left_out(planned: PlannedRun) -> Iterator[Finding]:
    left_out = sorted(planned.splits.excluded, key=lambda item: item.reason)
    for reason, found in groupby(left_out, key=lambda item: item.reason):
        yield from notice(
            planned,
            found=list(found),
            declared="every row of the release is an utterance",
            effect=f"cannot be used ({reason})",
            fix="Repair these rows or clips, or take them out of the TSV.",
        )


def _check_limits(planned: PlannedRun) -> Iterator[Finding]:
    """Tell of limits that leave out much of train, and of what is beyond them in dev and test."""
    shortest, longest = (planned.knobs.get(name) for name in ("min_seconds", "max_seconds"))
    if shortest is None or longest is None:
        return
    outside = planned.splits.out_of_range
    if len(outside) > MANY_OUTSIDE * (len(outside) + len(planned.splits.train)):
        yield from notice(
            planned,
            "max_seconds",
            found=outside,
            declared=f"training takes utterances of {shortest:g} to {longest:g} s",
            effect="are left out of it",
            fix="Widen `min_seconds` and `max_seconds`, or cut the clips.",
        )
    beyond = [
        item for name in planned.splits.evaluated() for item in _beyond(planned, name, longest)
    ]
    yield from notice(
        planned,
        "max_seconds",
        found=beyond,
        declared=f"training takes utterances of up to {longest:g} s",
        effect="are longer, and scored all the same",
        fix="Raise `max_seconds`, or cut the clips.",
    )


def _beyond(planned: PlannedRun, split: str, longest: float) -> Iterator[Excluded]:
    samples = transcripts_of(planned)[split].samples
    rows = np.flatnonzero(samples > seconds_to_samples(longest))
    details = (f"{samples_to_seconds(int(count)):.2f} s" for count in samples[rows])
    return named(planned, split, rows, "longer than what training takes", details)


def _check_empty(planned: PlannedRun) -> Iterator[Finding]:
    found = [
        item
        for name, transcripts in transcripts_of(planned).items()
        for item in named(
            planned, name, np.flatnonzero(transcripts.characters == 0), "empty transcript"
        )
    ]
    yield from notice(
        planned,
        found=found,
        declared="every utterance has a transcript",
        effect="have none: each word heard there is an error",
        fix="Write down what is said, or take the rows out.",
    )


def _check_rates(planned: PlannedRun) -> Iterator[Finding]:
    """Find transcripts that nobody can have said in the time; CTC's impossible ones are told."""
    transcripts = transcripts_of(planned)
    rates = {
        name: each.characters * SAMPLE_RATE / np.maximum(1, each.samples)
        for name, each in transcripts.items()
    }
    lower, upper = np.percentile(rates["train"], (25, 75))
    fence = upper + FENCE * (upper - lower)
    told = impossible_rows(planned)
    found = [
        item
        for name, each in rates.items()
        for item in _too_fast(planned, name, each, fence, told[name])
    ]
    yield from notice(
        planned,
        found=found,
        declared=f"speech is as fast as most of train, {lower:.0f} to {upper:.0f} characters a s",
        effect=f"have more than {fence:.0f} characters a second",
        fix="Correct the transcripts, or the clips that end early.",
    )


def _too_fast(
    planned: PlannedRun, split: str, rates: npt.NDArray[np.float64], fence: float, told: Rows
) -> Iterator[Excluded]:
    rows = np.setdiff1d(np.flatnonzero(rates > fence), told)
    details = (f"{rate:.1f} characters a second" for rate in rates[rows])
    return named(planned, split, rows, "too fast", details)
