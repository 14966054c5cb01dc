"""Numbers that the run would refuse, or that would end it."""

from collections.abc import Iterator
from contextlib import suppress

from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.argument_ranges import arguments_out_of_range
from sbkit.config.ranges import RANGES, out_of_range


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find each knob, and each argument of a class that declares its ranges, out of its range."""
    ranges = dict(RANGES)
    with suppress(MissingPartError):  # a YAML of SpeechBrain's names no recipe
        ranges |= planned.recipe.ranges
    reported: dict[str | int, str] = {}
    for name, sentence in out_of_range(planned.knobs, ranges):
        reported[name] = sentence
        yield planned.finding("ranges", name, **words_of(sentence))
    for keys, sentence in arguments_out_of_range(planned.overridden):
        if keys[0] not in reported:
            yield planned.finding("ranges", *keys, **words_of(sentence))
