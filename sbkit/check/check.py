"""Run every check over one planned run, and gather their findings."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.messages import plural
from sbkit.check import cost, data, dry_run, ownership, settings
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.distributed.ranks import single_rank
from sbkit.logs.progress import progress_bar
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

Check = Callable[[PlannedRun], Iterable[Finding] | None]  # None: it only raises

CHECKS_OF_VALUES: tuple[Check, ...] = (  # nothing is built for them
    settings.check_ranges,
    settings.check_placement,
)
CHECKS: tuple[Check, ...] = (  # their findings are reported in this order
    *CHECKS_OF_VALUES,
    *(ownership.check_ownership, ownership.check_optimizers, settings.check_batches),
    *(data.check_labels, data.check_alignment, data.check_masks),
    *(dry_run.check_shapes, dry_run.check_state, dry_run.check_learning_rate),
    *(dry_run.check_causality, dry_run.check_padding),
    *(data.check_data, data.check_silence),
    *(dry_run.check_unused, settings.check_unread, settings.check_freezing),
    cost.check_cost,
    *(settings.check_run_folder, settings.check_initial_weights, settings.check_export),
)

FILE_AND_LINE = re.compile(r"[^\s(]+\.yaml:\d+")
QUOTED_KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_planned_run(planned: PlannedRun, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Return all findings, each once, and last the steps that failed.

    If a value is out of its range nothing is built: the consequences would be reported beside it.
    """
    is_in_range = not any(settings.check_ranges(planned))
    if is_in_range:
        planned.take_steps()
    chosen = [check for check in checks if is_in_range or check in CHECKS_OF_VALUES]
    findings: list[Finding] = []
    with progress_bar("checking the run", len(chosen)) as advance:
        for check in chosen:
            findings += _run(check, planned)
            advance(1)
    stopping = {finding.where for finding in findings if finding.stops}
    findings += [
        _from_error(error, name, planned)
        for name, error in planned.faults.items()
        if stopping.isdisjoint(_places(error, planned))
    ]
    return list({finding.problem: finding for finding in findings}.values())


def check_before_training(run: Run) -> None:
    """Check a run before its first step: log notes, and raise ConfigError if there are errors."""
    with (
        single_rank(),
        PlannedRun(run.yaml_file, run.overrides, recipe=run.load_recipe()) as planned,
    ):
        findings = check_planned_run(planned)
    stopping = [finding for finding in findings if finding.stops]
    if len(stopping) == 1:
        raise ConfigError(stopping[0].as_sentence())
    for finding in stopping:
        print(finding, file=sys.stderr)
    if stopping:
        raise ConfigError(
            f"`sbkit check` found {len(stopping)} errors, printed above. Fix them, or pass "
            "--check=False."
        )
    for finding in findings:
        logger.info(f"note: {finding.as_sentence()}")


def summary(findings: Sequence[Finding]) -> str:
    """Count findings by severity: "2 errors and 1 note"."""
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
    """Make a finding of an error, at the line or the key that it names."""
    message = str(error).replace(str(planned.folder), str(planned.run_folder))
    place, keys = FILE_AND_LINE.search(message), _places(error, planned)
    where = place[0] if place else next(iter(keys), planned.place())
    return Finding(check=check, where=where, problem=message.rstrip("."))


def _places(error: SbkitError, planned: PlannedRun) -> list[str]:
    """Locate the keys that an error names."""
    paths = [key.split(".") for key in QUOTED_KEY.findall(str(error))]
    return [planned.place(*path) for path in paths if path[0] in planned.document.root]
