"""`sbkit check`: a YAML on the command line, its findings on the screen."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.check.check import check_planned_run
from sbkit.check.cost import NAME as PREDICTION
from sbkit.check.cost import Prediction, as_table
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.check.untrusted import check_untrusted
from sbkit.config.hparams import parse_overrides

FINDINGS = 1  # exit code


def check_file(
    yaml_file: Path,
    arguments: Sequence[str],
    *,
    target: str | None = None,
    untrusted: bool = False,
    as_json: bool = False,
) -> int:
    """Print every finding; give 0 when there is none, 1 when there are, 2 for unreadable YAML."""
    if untrusted:
        findings = _check_foreign(yaml_file, arguments)
        _tell(findings, None, as_json=as_json)
        return FINDINGS if findings else 0
    overrides = parse_overrides(arguments)
    with PlannedRun(yaml_file, overrides, target=target) as planned:
        findings = check_planned_run(planned)
        prediction = planned.parts.get(PREDICTION)
    _tell(findings, prediction, as_json=as_json)
    return FINDINGS if findings else 0


def _check_foreign(yaml_file: Path, arguments: Sequence[str]) -> list[Finding]:
    if arguments:
        raise SbkitError(
            f"--untrusted must come with a file alone, but {arguments[0]} came too. Leave it out: "
            "no value is looked at, only what would be built."
        )
    return check_untrusted(yaml_file)


def _tell(findings: Sequence[Finding], prediction: Prediction | None, *, as_json: bool) -> None:
    if as_json:
        record = {"findings": [finding.as_record() for finding in findings]}
        predicted = {"prediction": asdict(prediction)} if prediction else {}
        print(to_json(record | predicted))
        return
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings" if findings else "Nothing found.")
    if prediction is not None:
        print(as_table(prediction))
