"""A recognized word with its times and confidence."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Word:
    """A word, its times in seconds, and the probability that it is right.

    confidence: calibrated on a validation set; None where none could be.
    """

    text: str
    start: float
    end: float
    confidence: float | None = None

    def later(self, seconds: float) -> "Word":
        """Return the word with later times."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, times rounded to milliseconds, without an unknown confidence."""
        times = {"start": round(self.start, 3), "end": round(self.end, 3)}
        known = {} if self.confidence is None else {"confidence": self.confidence}
        return {"text": self.text, **times, **known}
