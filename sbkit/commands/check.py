"""`sbkit check`: a YAML on the command line, its findings on the screen."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sbkit.base.files import to_json
from sbkit.base.messages import printable_json
from sbkit.check.check import check_planned_run, summary
from sbkit.check.cost import COST, find_batch_seconds
from sbkit.check.planned_run import Finding, PlannedRun
from sbkit.check.settings import INITIAL_WEIGHTS
from sbkit.config.overrides import parse_overrides

FINDINGS_EXIT = 1  # exit code


def check_file(
    yaml_file: Path,
    arguments: Sequence[str],
    *,
    target: str | None = None,
    as_json: bool = False,
    strict: bool = False,
) -> int:
    """Print every finding, and return the exit code.

    Args:
        yaml_file: the YAML of the run.
        arguments: overrides, as on the command line.
        target: the machine to check for, such as cuda:8; by default this one.
        as_json: print one JSON object.
        strict: return 1 for notes, too.

    Raises:
        SbkitError: the YAML cannot be read; the command exits with 2.
    """
    overrides = find_batch_seconds(yaml_file, parse_overrides(arguments), target=target)
    with PlannedRun(yaml_file, overrides, target=target) as planned:
        findings = check_planned_run(planned)
    cost = planned.results.get(COST)  # None if it could not be measured
    if as_json:
        record = {"findings": [finding.as_record() for finding in findings]}
        print(printable_json(to_json(record | ({COST: asdict(cost)} if cost else {}))))
    else:
        lines = planned.results.get(INITIAL_WEIGHTS, [])
        print(*findings, *lines, summary(findings), *([cost] if cost else []), sep="\n")
    return exit_code(findings, strict=strict)


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return 1 if a finding stops the run; with ``strict``, if there is any finding."""
    return FINDINGS_EXIT if any(strict or finding.stops for finding in findings) else 0
