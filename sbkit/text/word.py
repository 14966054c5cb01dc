"""A word that was heard, when it is said, and how sure that is."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Word:
    """A word, when it is said, in seconds, and the probability that it is right.

    confidence: calibrated on a validation set; None where none could be.
    """

    text: str
    start: float
    end: float
    confidence: float | None = None

    def later(self, seconds: float) -> "Word":
        """Return the word in audio that begins earlier."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, times in milliseconds' precision, without what is not known."""
        times = {"start": round(self.start, 3), "end": round(self.end, 3)}
        known = {} if self.confidence is None else {"confidence": self.confidence}
        return {"text": self.text, **times, **known}
