"""What a check finds: what must hold, what would happen instead, where, and how to fix it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sbkit.base.messages import plural, printable

SHOWN = 5  # ids in a sentence; `--json` has all


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what is declared and what would take effect.

    where: FILE:LINE, or --KEY of the command line; declared, effect: the halves of a sentence that
    ", but " joins, the first empty where there is only one; stops: the run is not started (an
    error; otherwise a note); ids: of the utterances that it is about.
    """

    check: str
    declared: str
    effect: str
    where: str
    fix: str
    stops: bool = True
    ids: tuple[str, ...] = field(default=(), repr=False)

    @property
    def severity(self) -> str:
        """Return "error" for what stops a run, "note" for what does not."""
        return "error" if self.stops else "note"

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


def words_of(sentence: str) -> dict[str, Any]:
    """Split an error into what is declared, if it has a ", but ", the fault, and what to do."""
    declared, _, rest = sentence.partition(", but ")
    if not rest or ". " in declared:
        declared, rest = "", sentence
    effect, _, fix = rest.partition(". ")
    return {"declared": declared, "effect": effect.rstrip("."), "fix": fix or "Correct it there."}
