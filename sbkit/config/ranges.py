"""What the numbers of a run may be, asked before anything is built of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbkit.base.errors import SbkitError

DAY = 24 * 60 * 60  # seconds


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that a knob may take; ``advice`` is what to do about another."""

    advice: str
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        """Tell whether a knob may have this value."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """Say it in a user's words."""
        kind = "a whole number" if self.whole else "a number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} of at least {self.low:g}" if self.low > -math.inf else kind


RANGES = {  # of what every run has; a recipe has its own, too
    "seed": Range(low=0, whole=True, advice="Pass any other."),
    "num_workers": Range(low=0, whole=True, advice="Pass 0 to read in the training process."),
    "number_of_epochs": Range(low=1, whole=True, advice="Pass 1 to train for one."),
    "grad_accumulation_factor": Range(low=1, whole=True, advice="Pass 1 to split no step."),
    "log_every": Range(low=1, whole=True, advice="Pass 1 to log every step."),
    "nonfinite_patience": Range(low=0, whole=True, advice="Pass 0 to stop at the first such step."),
    "stall_seconds": Range(low=0, high=DAY, advice="Pass 0 for no watch."),
    "average_checkpoints": Range(low=1, whole=True, advice="Pass 1 to take the best alone."),
    "ckpt_interval_minutes": Range(advice="Pass 0 to save after an epoch only."),  # as below 0
}


def out_of_range(
    knobs: Mapping[str, Any], ranges: Mapping[str, Range] = RANGES
) -> Iterator[tuple[str, str]]:
    """Give each knob that has a value out of its range, with the sentence that refuses it."""
    for name, allowed in ranges.items():
        if name in knobs and knobs[name] not in allowed:
            yield name, f"`{name}` must be {allowed}, but is {knobs[name]!r}. {allowed.advice}"


def refuse_out_of_range(knobs: Mapping[str, Any], ranges: Mapping[str, Range] = RANGES) -> None:
    """Refuse the first knob that has a value out of its range.

    Raises SbkitError.
    """
    for _, sentence in out_of_range(knobs, ranges):
        raise SbkitError(sentence)
