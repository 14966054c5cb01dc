"""Numbers that the run would refuse, or that would end it."""

from collections.abc import Iterator

from sbkit.check.finding import Finding, words_of
from sbkit.check.subject import Subject
from sbkit.machine.ranges import out_of_range


def check_ranges(subject: Subject) -> Iterator[Finding]:
    """Find each knob whose value is out of its range."""
    for name, sentence in out_of_range(subject.knobs):
        yield subject.finding("ranges", name, **words_of(sentence))
