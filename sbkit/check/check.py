"""Run every check over one planned run, and gather their findings."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.base.messages import plural
from sbkit.check import cost, data, dry_run, learn, ownership, settings
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.distributed.ranks import single_rank
from sbkit.logs.progress import progress_bar

logger = logging.getLogger(__name__)

Check = Callable[[PlannedRun], Iterable[Finding] | None]  # None: it only raises

CHECKS_OF_VALUES: tuple[Check, ...] = (  # nothing is built for them
    settings.check_ranges,
    settings.check_placement,
)
CHECKS: tuple[Check, ...] = (  # their findings are reported in this order
    *CHECKS_OF_VALUES,
    *(settings.check_formats, settings.check_batches),
    *(ownership.check_ownership, ownership.check_optimizers),
    *(data.check_labels, data.check_alignment, data.check_masks, data.check_positions),
    *(dry_run.check_shapes, dry_run.check_state, dry_run.check_steps),
    *(dry_run.check_causality, dry_run.check_padding),
    *(data.check_data, data.check_channels, data.check_silence),
    *(dry_run.check_unused, settings.check_unread, settings.check_freezing),
    learn.check_causes,
    *(cost.check_recordings, cost.check_cost),
    *(settings.check_run_folder, settings.check_initial_weights, settings.check_export),
)

FILE_AND_LINE = re.compile(r"[^\s(]+\.yaml:\d+")
QUOTED_KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_planned_run(planned: PlannedRun, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run the checks, and return each finding once; the errors of the setup come last.

    planned: a `PlannedRun`, which `Run.check()` makes for you.

    If a value is out of its range, nothing is built, and only the checks of values run: the others
    would report consequences of that value.
    """
    if any(finding.stops for finding in _run(settings.check_ranges, planned)):
        checks = [check for check in checks if check in CHECKS_OF_VALUES]
    else:
        planned.make_all()
    findings: list[Finding] = []
    with progress_bar("checking the run", len(checks)) as advance:
        for check in checks:
            findings += _run(check, planned)
            advance(1)
    errors = [finding for finding in findings if finding.stops]
    reported = {error.where for error in errors} | {error.problem for error in errors}
    for name, error in planned.faults.items():
        failure = _from_error(error, name, planned)
        if reported.isdisjoint([failure.problem, *_places_of_keys(error, planned)]):
            findings.append(failure)
    # A likely cause would repeat the error at its place.
    findings = [f for f in findings if f.check != "causes" or f.where not in reported]
    # Of equal problems at one place, an error is kept rather than a note.
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first = unique.setdefault((finding.where, finding.problem), finding)
        if finding.stops and not first.stops:
            unique[finding.where, finding.problem] = finding
    return list(unique.values())


def check_before_training(planned: PlannedRun) -> None:
    """Check a run before its first step: log the notes, and raise ConfigError for errors."""
    with single_rank():
        findings = check_planned_run(planned)
    errors = [finding for finding in findings if finding.stops]
    for finding in findings:
        if not finding.stops:
            logger.info(f"note: {finding.as_sentence()}")
    if len(errors) == 1:
        raise ConfigError(errors[0].as_sentence())
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        raise ConfigError(
            f"`sbkit check` found {len(errors)} errors, printed above. Fix them, or set "
            "`check: False`."
        )


def summary(findings: Sequence[Finding]) -> str:
    """Write how many errors and notes there are: "2 errors and 1 note"."""
    counts = Counter(finding.severity for finding in findings)
    parts = [plural(counts[word], word) for word in ("error", "note") if counts[word]]
    return " and ".join(parts) or "Nothing found."


def _run(check: Check, planned: PlannedRun) -> Iterator[Finding]:
    name = check.__name__.removeprefix("check_")
    try:
        for finding in check(planned) or ():
            yield replace(finding, check=name)
    except MissingPartError:
        return
    except SbkitError as error:
        yield _from_error(error, name, planned)
    except Exception as error:
        yield Finding(
            check=name,
            where=planned.place(),
            problem=f"The check `{name}` did not complete ({type(error).__name__}: {error})",
            fix="Correct the part that the error names; if it is sound, report a bug of sbkit.",
            stops=False,
        )


def _from_error(error: SbkitError, check: str, planned: PlannedRun) -> Finding:
    """Turn an error into a finding at its place.

    That is the line of a YAML, the file or the first key that the error names. An error of the data
    without any is at the key of the data.
    """
    message = str(error).replace(str(planned.folder), str(planned.run_folder))
    error_file = error.where.rpartition(":")[0] or error.where  # stands before the problem
    line = FILE_AND_LINE.search(message)
    places = _places_of_keys(error, planned)
    declared = planned.place(*(["data_folder"] if isinstance(error, DataError) else []))
    where = line[0] if line else error.where or next(iter(places), declared)
    return Finding(
        check=check, where=where, problem=message.removeprefix(f"{error_file}: ").rstrip(".")
    )


def _places_of_keys(error: SbkitError, planned: PlannedRun) -> list[str]:
    """Locate the keys that an error quotes."""
    paths = [key.split(".") for key in QUOTED_KEY.findall(str(error))]
    return [planned.place(*path) for path in paths if path[0] in planned.document.root]
