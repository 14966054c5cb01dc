"""Run every check over one planned run, and gather all that they find."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator

from sbkit.base.errors import SbkitError
from sbkit.check.cost import check_cost
from sbkit.check.data import check_alignment, check_labels, check_masks, check_report, check_silence
from sbkit.check.dependence import check_causality, check_padding
from sbkit.check.dry_run import check_freezing, check_rate, check_shapes, check_state, check_unused
from sbkit.check.existing_run import check_export, check_initial_weights, check_run_folder
from sbkit.check.finding import Finding, words_of
from sbkit.check.knobs import check_ranges, check_unread
from sbkit.check.ownership import check_optimizers, check_ownership
from sbkit.check.placement import check_placement, check_shares
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.distributed.ranks import single_rank
from sbkit.logs.progress import shown
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

Check = Callable[[PlannedRun], Iterable[Finding]]

UNBUILT: tuple[Check, ...] = (check_ranges, check_placement)
CHECKS: tuple[Check, ...] = (
    *UNBUILT,
    check_ownership,
    check_optimizers,
    check_shares,
    check_labels,
    check_alignment,
    check_masks,
    check_shapes,
    check_state,
    check_rate,
    check_causality,
    check_padding,
    check_report,
    check_silence,
    check_unused,
    check_unread,
    check_freezing,
    check_cost,
    check_run_folder,
    check_initial_weights,
    check_export,
)  # in the order in which their findings are reported

PLACE = re.compile(r"[^\s(]+\.yaml:\d+")
KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_planned_run(planned: PlannedRun, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Return all findings, those of parts that cannot be made last, and each once.

    With a value out of its range nothing is built: what comes of it would be reported beside it.
    """
    found = list(check_ranges(planned))
    if not found:
        planned.take_steps()
    chosen = [each for each in checks if each in UNBUILT or not found]
    found = []
    with shown("checking the run", len(chosen)) as advance:
        for check in chosen:
            found += _run(check, planned)
            advance(1)
    stopping = {finding.where for finding in found if finding.stops}
    faults = [
        from_error(error, name, planned)
        for name, error in planned.faults.items()
        if stopping.isdisjoint(_places(error, planned))
    ]
    return list({(each.declared, each.effect): each for each in [*found, *faults]}.values())


def check_before_training(run: Run) -> None:
    """Check a run before its first step: print the notes, refuse to start over an error.

    Raises SbkitError for an error.
    """
    with (
        single_rank(),
        PlannedRun(run.yaml_file, run.overrides, recipe=run.load_recipe()) as planned,
    ):
        findings = check_planned_run(planned)
    stopping = [finding for finding in findings if finding.stops]
    if len(stopping) == 1:
        raise SbkitError(stopping[0].as_sentence())
    for finding in stopping:
        logger.error(finding)
    if stopping:
        raise SbkitError(
            f"A run must start without errors, but `sbkit check` found {len(stopping)}, printed "
            "above. Fix them, or pass --check=False."
        )
    for finding in findings:
        logger.info(f"note: {finding.as_sentence()}")


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
        )


def from_error(error: SbkitError, check: str, planned: PlannedRun) -> Finding:
    """Make a finding of an error's sentence, at the place or the key that it names."""
    sentence = str(error).replace(str(planned.folder), str(planned.run_folder))
    place, keys = PLACE.search(sentence), _places(error, planned)
    where = place[0] if place else next(iter(keys), planned.place())
    return Finding(check=check, where=where, **words_of(sentence))


def _places(error: SbkitError, planned: PlannedRun) -> list[str]:
    """Return the places of the keys that an error names."""
    paths = [key.split(".") for key in KEY.findall(str(error))]
    return [planned.place(*path) for path in paths if path[0] in planned.document.root]
