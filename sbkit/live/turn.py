"""A turn of a conversation, and when each stage of the pipeline was done with it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sbkit.live.session import Event


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    """A part of what is answered, as the synthesizer gets it."""

    text: str


@dataclass(eq=False)
class Turn:
    """What somebody said, and its trace; once it is interrupted it is not answered any further.

    times: by a clock in seconds, in their order: the end of the speech, then when its endpoint, the
    final text, the first text of the answer and the first sound were there.
    """

    text: str
    times: dict[str, float]
    is_interrupted: bool = False

    @property
    def delays(self) -> dict[str, float]:
        """Return the seconds that each stage added."""
        return {stage: end - at for (_, at), (stage, end) in pairwise(self.times.items())}

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        rounded = {stage: round(each, 3) for stage, each in self.delays.items()}
        interrupted = self.is_interrupted
        return {"event": "turn", "text": self.text, "interrupted": interrupted, "delays": rounded}

    def __str__(self) -> str:
        """Write the trace in a line."""
        parts = [f"{stage} {1000 * each:.0f}" for stage, each in self.delays.items()]
        end = ", interrupted" * self.is_interrupted
        return f"{' + '.join(parts)} = {1000 * sum(self.delays.values()):.0f} ms{end}"
