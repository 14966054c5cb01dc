"""The metrics of a recipe: whether lower is better, and how values are written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


def ratio(count: float, total: float) -> float:
    """Divide counts; return NaN for a total of 0, which is neither good nor bad."""
    return count / total if total else math.nan


def percent(share: float | None, digits: int = 1) -> str:
    """Write a share in percent; "none" for NaN, which is null in JSON."""
    return "none" if share is None or math.isnan(share) else f"{100 * share:.{digits}f} %"


@dataclass(frozen=True)
class Metric:
    """A metric that a recipe computes for a split.

    lower_is_better: true for error rates and losses; None for a figure that can be neither good nor
        bad, such as a share of blanks.
    is_fraction: whether values are written as percentages.
    unit: the unit of a metric that is not a fraction, such as dB.
    counts: returns two whole numbers for the result of an utterance. The metric is the sum of the
        first numbers divided by the sum of the second ones, and has a 95 % interval.

    >>> Metric().as_text(0.125), Metric(lower_is_better=False, unit="dB").as_text(12.5)
    ('12.5 %', '12.5 dB')
    """

    lower_is_better: bool | None = True
    is_fraction: bool = True
    unit: str = ""
    counts: Callable[[Any], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.unit:
            object.__setattr__(self, "is_fraction", False)

    def as_text(self, value: float | None) -> str:
        """Write a value with its unit."""
        if self.is_fraction or value is None or math.isnan(value):
            return percent(value)
        return f"{value:.4g} {self.unit}".rstrip()


Metrics = Mapping[str, Metric]  # by name; the first one selects the best checkpoint
LOSS_METRIC: Metrics = {"loss": Metric(is_fraction=False)}  # for a Brain that declares no metrics


def base_name(name: str) -> str:
    """Return the name of a metric without its split: `WER` for `dev-clean/WER`."""
    return name.rpartition("/")[2]


def describe_values(metrics: Metrics, values: Mapping[str, float]) -> list[str]:
    """Write each value with its name and unit."""
    plain = Metric(is_fraction=False)  # for a value that the recipe does not declare
    metric_of = {name: metrics.get(base_name(name), plain) for name in values}
    return [f"{name} {metric_of[name].as_text(value)}" for name, value in values.items()]


class BestKey(NamedTuple):
    """The metric that selects the best checkpoint, in the form of SpeechBrain's Checkpointer."""

    max_key: str | None
    min_key: str | None

    @property
    def name(self) -> str:
        return self.max_key or self.min_key or ""


def best_key(metrics: Metrics) -> BestKey:
    """Return the first metric, which selects the best checkpoint, with its direction."""
    name, metric = next(iter(metrics.items()))
    return BestKey(None, name) if metric.lower_is_better else BestKey(name, None)
