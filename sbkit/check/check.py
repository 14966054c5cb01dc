"""Run every check over one subject, and gather all that they find."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sbkit.check.finding import Finding
from sbkit.check.subject import PARTS, MissingPartError, Recipe, Subject
from sbkit.tensors.distributed import alone
from sbkit.tensors.log import say
from sbkit.values.errors import SbkitError

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: tuple[Check, ...] = ()  # in the order in which their findings are told

PLACE = re.compile(r"[^\s(]+\.yaml:\d+")
KEY = re.compile(r"`(?:--)?([\w.]+)`")


def check_subject(subject: Subject, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Give all findings, the faults of the parts that could not be had first."""
    for name in PARTS:
        with suppress(MissingPartError):
            getattr(subject, name)
    found = [finding for check in checks for finding in _run(check, subject)]
    faults = [from_error(error, name, subject) for name, error in subject.faults.items()]
    return [*faults, *found]


def prove(yaml_file: Path, overrides: Mapping[str, object], recipe: Recipe) -> None:
    """Check a run before its first step, tell what is found, and refuse to start over a fault.

    Raises SbkitError when a finding stops the run.
    """
    with alone(), Subject(yaml_file, overrides, recipe=recipe) as subject:
        findings = check_subject(subject)
    for finding in findings:
        print(finding, file=sys.stderr)
    stopping = sum(finding.stops for finding in findings)
    if stopping:
        raise SbkitError(
            f"What is declared must be what takes effect, but {stopping} of the findings above say "
            "that it is not. Mend them, or pass --check=False."
        )
    if findings:
        say(f"{len(findings)} findings, none of which stops the run")


def _run(check: Check, subject: Subject) -> Iterator[Finding]:
    with suppress(MissingPartError):
        yield from check(subject)


def from_error(error: SbkitError, check: str, subject: Subject) -> Finding:
    """Take a sentence apart: what must hold, what came, what to do."""
    sentence = str(error)
    place = PLACE.search(sentence)
    named = next((key for key in KEY.findall(sentence) if key in subject.document.root), None)
    declared, _, rest = sentence.partition(", but ")
    effect, _, mend = rest.partition(". ")
    words: dict[str, Any] = {"declared": declared, "effect": effect or sentence}
    return Finding(
        check=check,
        where=place[0] if place else subject.place(*([named] if named else [])),
        mend=mend or "Correct it there.",
        **words,
    )
