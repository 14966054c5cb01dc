"""What a model hears in a clip, before it is decoded.

Legend: U frames of 40 ms, V vocabulary, D model width.
"""

from dataclasses import dataclass
from typing import Any

from sbkit.decoding.frames import LogProbs


@dataclass(frozen=True, eq=False, slots=True)
class Heard:
    """log_probs (U, V) of CTC; states (U, D) of the encoder, a tensor where the runtime has them.

    They are for the attention decoder alone, and stay on the device of the model.
    """

    log_probs: LogProbs
    states: Any = None

    def part(self, first: int, end: int) -> "Heard":
        """Return some of the frames."""
        states = None if self.states is None else self.states[first:end]
        return Heard(self.log_probs[first:end], states)
