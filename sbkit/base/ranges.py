"""The ranges of a run's hyperparameters, checked before anything is built."""

import math
import pydoc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sbkit.base.errors import ConfigError

DAY = 24 * 60 * 60  # seconds


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that a key may have; ``advice`` says how to correct others.

    >>> share = Range(low=0, high=1, advice="0 is none, 1 is all.")
    >>> 0.5 in share, "half" in share, str(share)
    (True, False, 'a number from 0 to 1')
    """

    advice: str
    low: float = -math.inf
    high: float = math.inf
    integer: bool = False
    or_null: bool = False
    word: str | None = None  # may replace the number

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.or_null
        if isinstance(value, str):
            return value == self.word
        if isinstance(value, bool) or not isinstance(value, int if self.integer else int | float):
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        alternatives = "null or " * self.or_null + (f"{self.word} or " if self.word else "")
        kind = f"{alternatives}a {'whole ' * self.integer}number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} of at least {self.low:g}" if self.low > -math.inf else kind


@dataclass(frozen=True, kw_only=True)
class TextValue(Range):
    """Text or null; the options also allow false, a list of texts, or a mapping to texts."""

    advice: str = "Write a number as text, in two kinds of quotes: '\"2024\"'."
    or_false: bool = False
    or_list: bool = False
    or_mapping: bool = False  # of names to texts

    def __contains__(self, value: object) -> bool:
        if isinstance(value, list | Mapping):
            is_allowed = self.or_list if isinstance(value, list) else self.or_mapping
            texts = [*value, *(value.values() if isinstance(value, Mapping) else ())]
            return is_allowed and bool(value) and all(isinstance(text, str) for text in texts)
        return value is None or isinstance(value, str) or (self.or_false and value is False)

    def __str__(self) -> str:
        forms = " or a list of texts" * self.or_list + " or a mapping to texts" * self.or_mapping
        return f"{'false, ' * self.or_false}null or text{forms}"


SHARE = Range(low=0, high=1, advice="0 is none, 1 is all.")
NON_NEGATIVE_COUNT = Range(low=0, integer=True, advice="Pass 0 for none.")
POSITIVE_COUNT = Range(low=1, integer=True, advice="Pass 1 for the smallest.")
NON_NEGATIVE = Range(low=0, advice="Pass 0 for none.")

RANGES = {  # of the keys of every run; a class declares the ranges of its arguments as `RANGES`
    "seed": Range(low=0, high=2**63 - 1, integer=True, advice="Pass any such number."),
    "shuffle_shards": Range(low=1, integer=True, advice="Pass 1 to shuffle within each shard."),
    # Each worker is a process: without an upper limit a typo would take all memory.
    "num_workers": Range(low=0, high=1024, integer=True, advice="Pass 0 to read in this process."),
    "number_of_epochs": Range(low=1, integer=True, advice="Pass 1 to train for one."),
    "early_stopping": Range(low=0, integer=True, advice="Pass 0 to train all epochs."),
    "grad_accumulation_factor": Range(  # the plan of each micro-batch takes memory
        low=1, high=1 << 16, integer=True, advice="Pass 1 to split no step."
    ),
    "log_every": Range(low=1, integer=True, advice="Pass 1 to log every step."),
    "nonfinite_patience": Range(low=0, integer=True, advice="Pass 0 to stop at the first."),
    "stall_seconds": Range(low=0, high=DAY, advice="Pass 0 for no watch."),
    "ema_decay": SHARE,
    "average_checkpoints": Range(low=1, integer=True, advice="Pass 1 to take only the best."),
    "ckpt_interval_minutes": Range(advice="Pass 0 to save only after an epoch."),  # or below 0
    "lr": NON_NEGATIVE,
    "weight_decay": NON_NEGATIVE,
    "max_grad_norm": Range(advice="Pass 0 to clip nothing."),  # or below 0
    **dict.fromkeys(("init_from", "pretrained", "pretrained_revision"), TextValue()),
    "init_from_differs": TextValue(or_list=True),
    "vocab_size": Range(low=5, integer=True, or_null=True, advice="Pass null for characters."),
}


def out_of_range(
    values: Mapping[str, object], ranges: Mapping[str, Range] = RANGES
) -> Iterator[tuple[str, str]]:
    """Yield each key whose value is out of range, and the error."""
    for key, range_ in ranges.items():
        if key in values and values[key] not in range_:
            yield key, refusal(key, values[key], range_)


def refusal(key: str, value: object, range_: Range) -> str:
    """Write why a value is refused, and what to do."""
    return f"`{key}` must be {range_}, but is {value!r}. {range_.advice}"


def require_in_range(values: Mapping[str, object], ranges: Mapping[str, Range] = RANGES) -> None:
    """Raise ConfigError for the first value that is out of its range."""
    for _, error in out_of_range(values, ranges):
        raise ConfigError(error)


def ranges_of(name: str) -> Mapping[str, Range]:
    """Return the ranges that a class or function declares for its arguments, by its dotted name."""
    try:
        builder = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return {}  # building the YAML will refuse it
    ranges: Mapping[str, Range] = getattr(builder, "RANGES", {})
    return ranges
