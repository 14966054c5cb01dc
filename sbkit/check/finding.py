"""What a check finds: what is declared, what would take effect, where, and what mends it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what is declared and what would take effect.

    where: FILE:LINE; stops: training is not started over it (`sbkit check` tells of it all the
    same); ids: the utterances it is about; listing: the file in which all of them stand.
    """

    check: str
    declared: str
    effect: str
    where: str
    fix: str
    stops: bool = True
    ids: tuple[str, ...] = field(default=())
    listing: str | None = None

    def __str__(self) -> str:
        """Write it for a person, one fact a line."""
        return (
            f"{self.where}  [{self.check}]\n"
            f"  declared: {self.declared}\n"
            f"  effect:   {self.effect}\n"
            f"  fix:     {self.fix}"
        )

    def as_sentence(self) -> str:
        """Write it as one sentence, with its place unless that is only the file."""
        sentence = f"{self.declared}, but {self.effect}. {self.fix}"
        known = self.where in sentence or self.where.endswith(":1")
        return sentence if known else f"{sentence} ({self.where})"

    def as_record(self) -> dict[str, object]:
        """Flatten for JSON."""
        return asdict(self)


def words_of(sentence: str) -> dict[str, Any]:
    """Take an error's sentence apart: what must hold, what came, what to do."""
    declared, _, rest = sentence.partition(", but ")
    effect, _, fix = rest.partition(". ")
    return {
        "declared": declared,
        "effect": effect or sentence,
        "fix": fix or "Correct it there.",
    }
