"""A recognized word with its times and confidence."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """A recognized word, its times in seconds, and the probability that it is correct.

    confidence: calibrated on a validation set; None if unknown.
    channel: the speaker's channel, counted from 1, if channels are transcribed separately.

    >>> Word("hello", 0.5, 0.92).later(2.0).plain()
    {'text': 'hello', 'start': 2.5, 'end': 2.92}
    """

    text: str
    start: float
    end: float
    confidence: float | None = None
    channel: int | None = field(default=None, kw_only=True)

    def later(self, seconds: float) -> "Word":
        return replace(self, start=self.start + seconds, end=self.end + seconds)

    def plain(self) -> dict[str, Any]:
        """Return plain data for JSON, with times rounded to milliseconds."""
        times = {"start": round(self.start, 3), "end": round(self.end, 3)}
        confidence = {} if self.confidence is None else {"confidence": self.confidence}
        channel = {} if self.channel is None else {"channel": self.channel}
        return {"text": self.text, **times, **confidence, **channel}
