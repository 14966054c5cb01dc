"""Numbers that the run would refuse, or that would end it."""

from collections.abc import Iterator

from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.config.ranges import RANGES, out_of_range


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find each knob whose value is out of its range."""
    ranges = {**RANGES, **(planned.recipe.ranges if planned.has_recipe else {})}
    for name, sentence in out_of_range(planned.knobs, ranges):
        yield planned.finding("ranges", name, **words_of(sentence))
