"""Run every check over one planned run, and gather all that they find."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from sbkit.base.errors import SbkitError
from sbkit.check.cost import check_cost
from sbkit.check.data.alignment import check_alignment
from sbkit.check.data.labels import check_labels
from sbkit.check.data.speech import check_noises, check_speech
from sbkit.check.existing_run import check_export, check_initial_weights, check_run_folder
from sbkit.check.finding import Finding, cause_of, words_of, write_listings
from sbkit.check.knobs import check_ranges, check_unread
from sbkit.check.model.dependence import check_causality, check_features, check_padding
from sbkit.check.model.ownership import check_groups, check_ownership
from sbkit.check.model.placement import check_placement, check_shares
from sbkit.check.model.shapes import check_encoder, check_shapes
from sbkit.check.model.state import check_state
from sbkit.check.model.unused import check_unused
from sbkit.check.planned_run import PARTS, MissingPartError, PlannedRun
from sbkit.config.document import walk
from sbkit.distributed.ranks import single_rank
from sbkit.logs.log import log
from sbkit.train.run import Run

Check = Callable[[PlannedRun], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    check_encoder,
    check_ranges,
    check_ownership,
    check_groups,
    check_placement,
    check_shares,
    check_labels,
    check_alignment,
    check_features,
    check_shapes,
    check_state,
    check_causality,
    check_padding,
    check_speech,
    check_noises,
    check_unread,
    check_unused,
    check_cost,
    check_run_folder,
    check_initial_weights,
    check_export,
)  # in the order in which their findings are reported

PLACE = re.compile(r"[^\s(]+\.yaml:\d+")
KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_planned_run(planned: PlannedRun, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Return all findings, each cause once; the faults of parts that cannot be built come first."""
    for name in PARTS:
        with suppress(MissingPartError):
            getattr(planned, name)
    found = [finding for check in checks for finding in _run(check, planned)]
    faults = [
        from_error(error, name, planned)
        for name, error in planned.faults.items()
        if not _is_reported(error, found, planned)
    ]
    return list(_once([*faults, *found]))


def check_before_training(run: Run) -> None:
    """Check a run before its first step: print the notes, refuse to start over an error.

    Lists of utterances go into the folder `check` of the run. Raises SbkitError for an error.
    """
    with single_rank(), PlannedRun(run.yaml_file, run.overrides, recipe=run.recipe) as planned:
        findings = check_planned_run(planned)
    stopping = [finding for finding in findings if finding.stops]
    if len(stopping) == 1:
        raise SbkitError(stopping[0].as_sentence())
    for finding in stopping:
        print(finding, file=sys.stderr)
    if stopping:
        raise SbkitError(
            f"A run must start without errors, but `sbkit check` found {len(stopping)}, printed "
            "above. Fix them, or pass --check=False."
        )
    listings = write_listings(findings, planned.run_folder)
    for finding, listing in zip(findings, listings, strict=True):
        where = f" All of them are listed in {listing}." if listing else ""
        log(f"note: {finding.as_sentence()}{where}")


def _run(check: Check, planned: PlannedRun) -> Iterator[Finding]:
    """Run a check; one that raises is a finding itself, since it did not complete."""
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
            declared=f"the check `{name}` must run to its end",
            effect=f"it did not complete ({type(error).__name__}: {error})",
            fix="Correct the part that the error names; if it is sound, report a bug of sbkit.",
            stops=False,
            cause=cause_of(error),
        )


def _is_reported(error: SbkitError, found: Iterable[Finding], planned: PlannedRun) -> bool:
    """Return whether an error of a check is about a key that the sentence names, or below it.

    A note does not count: it may be about something else, and the run would not start.
    """
    named = {name.split(".")[0] for name in KEY.findall(str(error))}
    below = (keys for keys, _ in walk(planned.document.root) if keys and keys[0] in named)
    places = {planned.place(*keys) for keys in below}
    return any(finding.stops and finding.where in places for finding in found)


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Keep the first finding of each sentence, and of each Python error, errors before notes.

    Beside a value out of its range, those that only quote Python are left out: they follow from it.
    """
    findings = list(findings)
    if any(each.check == "ranges" for each in findings):
        findings = [each for each in findings if not each.quotes_python]
    causes = {each.cause for each in findings if each.cause and each.stops}
    seen: set[object] = set()
    for each in findings:
        sentence = (each.declared, each.effect)
        hidden = each.cause in seen or (each.cause in causes and not each.stops)
        if sentence not in seen and not hidden:
            yield each
            seen |= {sentence, each.cause} - {""}


def from_error(error: SbkitError, check: str, planned: PlannedRun) -> Finding:
    """Make a finding of an error's sentence, at the place or the key that it names."""
    sentence = planned.as_in_training(str(error))
    place = PLACE.search(sentence)
    named = next((key for key in KEY.findall(sentence) if key in planned.document.root), None)
    where = place[0] if place else planned.place(*([named] if named else []))
    return Finding(check=check, where=where, cause=cause_of(error), **words_of(sentence))
