"""Numbers that the run would refuse, or that would end it."""

from collections.abc import Iterator

from sbkit.check.finding import Finding, words_of
from sbkit.check.subject import Subject
from sbkit.machine.ranges import RANGES, out_of_range


def check_ranges(subject: Subject) -> Iterator[Finding]:
    """Find each knob whose value is out of its range."""
    ranges = {**RANGES, **(subject.recipe.ranges if subject.recipe else {})}
    for name, sentence in out_of_range(subject.knobs, ranges):
        yield subject.finding("ranges", name, **words_of(sentence))
