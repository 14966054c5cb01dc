"""How a metric of a recipe is read: which direction is better, and how it is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Metric:
    """A figure that a recipe computes of a split.

    lower_is_better: the direction, as of an error rate; is_fraction: it is shown in percent; unit:
    of another figure, such as dB.
    """

    lower_is_better: bool = True
    is_fraction: bool = True
    unit: str = ""

    def __post_init__(self) -> None:
        """Show a figure with a unit as it is."""
        if self.unit:
            object.__setattr__(self, "is_fraction", False)

    def as_text(self, value: float) -> str:
        """Write a value for a person."""
        return f"{100 * value:.1f} %" if self.is_fraction else f"{value:.4g} {self.unit}".rstrip()


Metrics = Mapping[str, Metric]  # by name; the first one chooses the best checkpoint
LOSS: Metrics = {"loss": Metric(is_fraction=False)}  # of a Brain without metrics of its own


def base_name(name: str) -> str:
    """Return the metric of a figure's name: that of `dev-clean/WER` is `WER`."""
    return name.rpartition("/")[2]


def as_words(metrics: Metrics, values: Mapping[str, float]) -> list[str]:
    """Write figures for a person, each with its name."""
    known = {**{base_name(name): Metric(is_fraction=False) for name in values}, **metrics}
    return [f"{name} {known[base_name(name)].as_text(value)}" for name, value in values.items()]


class BestKey(NamedTuple):
    """The metric that chooses the best checkpoint, as SpeechBrain's Checkpointer takes it."""

    max_key: str | None
    min_key: str | None

    @property
    def name(self) -> str:
        """Return the metric."""
        return self.max_key or self.min_key or ""


def best_key(metrics: Metrics) -> BestKey:
    """Name the first metric, by which the best checkpoint is chosen, with its direction."""
    name, metric = next(iter(metrics.items()))
    return BestKey(None, name) if metric.lower_is_better else BestKey(name, None)
