"""Run every check over one planned, and gather all that they find."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from sbkit.base.errors import SbkitError
from sbkit.check.alignment import check_alignment
from sbkit.check.cost import check_cost, write_prediction
from sbkit.check.existing_run import check_export, check_run_folder
from sbkit.check.finding import Finding, words_of
from sbkit.check.labels import check_labels
from sbkit.check.ownership import check_ownership
from sbkit.check.param_groups import check_groups
from sbkit.check.placement import check_placement, check_shares
from sbkit.check.planned_run import PARTS, MissingPartError, PlannedRun
from sbkit.check.ranges import check_ranges
from sbkit.check.shapes import check_shapes
from sbkit.check.speech import check_speech
from sbkit.check.unread import check_unread
from sbkit.check.unused import check_unused
from sbkit.config.document import walk
from sbkit.distributed.ranks import alone
from sbkit.logs.log import say
from sbkit.train.run import Run

Check = Callable[[PlannedRun], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    check_ranges,
    check_ownership,
    check_groups,
    check_placement,
    check_shares,
    check_labels,
    check_alignment,
    check_shapes,
    check_speech,
    check_unread,
    check_unused,
    check_cost,
    check_run_folder,
    check_export,
)  # in the order in which their findings are told

PLACE = re.compile(r"[^\s(]+\.yaml:\d+")
KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_planned_run(planned: PlannedRun, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Give all findings, the faults of the parts that could not be had first."""
    for name in PARTS:
        with suppress(MissingPartError):
            getattr(planned, name)
    found = [finding for check in checks for finding in _run(check, planned)]
    faults = [
        from_error(error, name, planned)
        for name, error in planned.faults.items()
        if not _is_told(error, found, planned)
    ]
    told = {(each.declared, each.effect): each for each in reversed([*faults, *found])}
    return [*reversed(told.values())]  # two parts, or a check, may fail over one fault


def check_before_training(run: Run) -> None:
    """Check a run before its first step, tell what is found, and refuse to start over a fault.

    Raises SbkitError when a finding stops the run.
    """
    with alone(), PlannedRun(run.yaml_file, run.overrides, recipe=run.recipe) as planned:
        findings = check_planned_run(planned)
    stopping = [finding for finding in findings if finding.stops]
    if len(stopping) == 1:
        raise SbkitError(stopping[0].as_sentence())
    for finding in stopping:
        print(finding, file=sys.stderr)
    if stopping:
        raise SbkitError(
            f"What is declared must be what takes effect, but {len(stopping)} findings say that "
            "it is not. Mend them, or pass --check=False."
        )
    for finding in findings:
        say(finding.as_sentence())
    with suppress(OSError):  # a folder that cannot be written is refused by what needs it
        write_prediction(planned)


def _run(check: Check, planned: PlannedRun) -> Iterator[Finding]:
    """Run a check; one that fails itself is a finding, for nothing was proved."""
    name = check.__name__.removeprefix("check_")
    try:
        yield from check(planned)
    except MissingPartError:
        return
    except SbkitError as error:
        yield from_error(error, name, planned)
    except Exception as error:
        yield planned.finding(
            name,
            declared=f"the check `{name}` must come to its end",
            effect=f"it failed, so that it proves nothing ({type(error).__name__}: {error})",
            fix="Look at the part that the error names; if that is sound, the check is not.",
            stops=False,
        )


def _is_told(error: SbkitError, found: Iterable[Finding], planned: PlannedRun) -> bool:
    """Tell whether a check has found out more about a key that the sentence names, or below it."""
    named = {name.split(".")[0] for name in KEY.findall(str(error))}
    below = (keys for keys, _ in walk(planned.document.root) if keys and keys[0] in named)
    places = {planned.place(*keys) for keys in below}
    return any(finding.where in places for finding in found)


def from_error(error: SbkitError, check: str, planned: PlannedRun) -> Finding:
    """Take a sentence apart: what must hold, what came, what to do."""
    sentence = planned.as_in_training(str(error))
    place = PLACE.search(sentence)
    named = next((key for key in KEY.findall(sentence) if key in planned.document.root), None)
    where = place[0] if place else planned.place(*([named] if named else []))
    return Finding(check=check, where=where, **words_of(sentence))
