"""`sbkit check`: a YAML on the command line, its findings on the screen."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sbkit.base.files import to_json
from sbkit.base.messages import printable_json
from sbkit.check.batch_seconds import find_batch_seconds
from sbkit.check.check import check_planned_run
from sbkit.check.cost import NAME as COST
from sbkit.check.existing_run import INITIAL
from sbkit.check.finding import Finding, summary
from sbkit.check.planned_run import PlannedRun
from sbkit.config.hparams import parse_overrides

FINDINGS = 1  # exit code


def check_file(
    yaml_file: Path,
    arguments: Sequence[str],
    *,
    target: str | None = None,
    as_json: bool = False,
    strict: bool = False,
) -> int:
    """Print every finding; return 1 when one stops the run (strict: or there is a note), else 0.

    Raises SbkitError for a YAML that cannot be read, over which the command leaves with 2.
    """
    overrides = find_batch_seconds(yaml_file, parse_overrides(arguments), target=target)
    with PlannedRun(yaml_file, overrides, target=target) as planned:
        findings = check_planned_run(planned)
    cost = planned.results.get(COST)  # where it could be measured
    if as_json:
        record = {"findings": [finding.as_record() for finding in findings]}
        print(printable_json(to_json(record | ({COST: asdict(cost)} if cost else {}))))
    else:
        loaded = planned.results.get(INITIAL, [])
        print(*findings, *loaded, summary(findings), *([cost] if cost else []), sep="\n")
    return exit_code(findings, strict=strict)


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return 1 when a finding stops the run; strict: also when there is any."""
    return FINDINGS if any(strict or finding.stops for finding in findings) else 0
