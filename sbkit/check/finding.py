"""What a check finds: what must hold, what would happen instead, where, and how to fix it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.text import plural, printable
from sbkit.data.corpora.splits import Excluded, write_excluded

FOLDER = "check"  # in the run's
SHOWN = 5  # ids in a sentence; more of them go into a file


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what is declared and what would take effect.

    where: FILE:LINE; declared, effect: the halves of a sentence that ", but " joins, the first
    empty where there is only one; stops: the run is not started (an error; otherwise a note);
    utterances: those that it is about; cause: the Python error that it comes from, if any: two
    findings of one cause are reported once.
    """

    check: str
    declared: str
    effect: str
    where: str
    fix: str
    stops: bool = True
    utterances: tuple[Excluded, ...] = field(default=(), repr=False)
    cause: str = ""

    @property
    def severity(self) -> str:
        """Return "error" for what stops a run, "note" for what does not."""
        return "error" if self.stops else "note"

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the utterances that it is about."""
        return tuple(item.id for item in self.utterances)

    def __str__(self) -> str:
        """Write it as a compiler would: place, severity, sentence, check; then how to fix it."""
        said = printable(f"{self.where}: {self.severity}: {self._said} [{self.check}]")
        return f"{said}\n  fix: {printable(self.fix)}"

    def as_sentence(self) -> str:
        """Write it as one sentence, with its place unless that is only the file."""
        sentence = f"{self._said}. {self.fix}"
        if sentence.split(" ")[0].isalpha():  # no key
            sentence = sentence[:1].upper() + sentence[1:]
        known = self.where in sentence or self.where.endswith(":1")
        return printable(sentence if known else f"{sentence} ({self.where})")

    @property
    def quotes_python(self) -> bool:
        """Return whether the sentence only quotes a Python error."""
        return bool(self.cause) and self.cause.partition(":")[0] in self.effect

    @property
    def _said(self) -> str:
        return f"{self.declared}, but {self.effect}" if self.declared else self.effect

    def as_record(self) -> dict[str, object]:
        """Return what JSON can hold."""
        names = ("check", "severity", "stops", "where", "declared", "effect", "fix")
        return {name: getattr(self, name) for name in names} | {"ids": list(self.ids)}


def summary(findings: Sequence[Finding]) -> str:
    """Count findings by severity: "2 errors and 1 note"."""
    counts = {"error": 0, "note": 0}
    for finding in findings:
        counts[finding.severity] += 1
    found = [plural(count, word) for word, count in counts.items() if count]
    return " and ".join(found) or "Nothing found."


def cause_of(error: BaseException) -> str:
    """Return the Python error that an error comes from; "" for a sentence that comes from none."""
    while error.__cause__ is not None:
        error = error.__cause__
    return "" if isinstance(error, SbkitError) else f"{type(error).__name__}: {error}"


def words_of(sentence: str) -> dict[str, Any]:
    """Split an error's sentence into what must hold, what came, and what to do."""
    declared, _, rest = sentence.partition(", but ")
    effect, _, fix = rest.partition(". ")
    if not effect:
        return {"declared": "", "effect": sentence.rstrip("."), "fix": "Correct it there."}
    return {"declared": declared, "effect": effect.rstrip("."), "fix": fix or "Correct it there."}


def write_listings(findings: Iterable[Finding], run_folder: Path | None) -> Iterator[Path | None]:
    """Write a TSV of each finding about more utterances than its sentence names; yield its path."""
    for finding in findings:
        if run_folder is None or len(finding.utterances) <= SHOWN:
            yield None
            continue
        name = re.sub(r"\W+", "_", finding.utterances[0].reason).strip("_")
        file = run_folder / FOLDER / f"{name}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_excluded(file, finding.utterances)
        yield file
