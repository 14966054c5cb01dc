"""What the Brain of a recipe defines to be measured: its metrics, scores and reports.

A Brain without `metrics` is judged by its loss.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from sbkit.logs.metric import LOSS, Metrics, as_words

BEST_EPOCH = "best_epoch"  # of a checkpoint's meta file


def metrics_of(kind: Any) -> Metrics:
    """Return what a Brain is judged by: its `metrics`, or else the loss."""
    return getattr(kind, "metrics", None) or LOSS


class Scoring:
    """The part of a Brain that a recipe with `metrics` writes.

    Attributes:
        metrics: what `measure` computes, by name; the first one chooses the best checkpoint. It is
            the class's: a recipe of SpeechBrain's may have an attribute of that name.
    """

    metrics: ClassVar[Metrics] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Of the evaluated splits, by name: the current one, the results of `score`, or else the sum
        # and the count of each loss, and the values of the columns of `report_by`.
        self._split = ""
        self._results: dict[str, list[Any]] = {}
        self._columns: dict[str, list[Any]] = {}

    def score(self, outputs: Any, batch: Any) -> Sequence[Any]:
        """Return a result for every utterance of an evaluated batch, plain data that travels."""
        raise NotImplementedError("a Brain with `metrics` defines `score`")

    def measure(self, results: Sequence[Any]) -> Mapping[str, float]:
        """Return the value of each of `metrics` over the results of a split."""
        if type(self).metrics:
            raise NotImplementedError("a Brain with `metrics` defines `measure`")
        sums, counts = (
            math.fsum(each) for each in (zip(*results, strict=True) if results else ((), ()))
        )
        return {"loss": sums / counts if counts else math.nan}

    def measured(self, results: Sequence[Any]) -> dict[str, float]:
        """Return what `measure` computes, the metric that chooses the best checkpoint first."""
        numbers = {name: float(value) for name, value in self.measure(results).items()}
        best = next(iter(metrics_of(type(self))))
        return {best: numbers[best], **numbers}

    def measure_slice(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """Return the figures of a part of a test set; a recipe may add counts and intervals."""
        return self.measure(results)

    def report(self, split: str, results: Sequence[Any], folder: Path) -> Mapping[str, Any]:
        """Write a test set's report into the run folder; return its entry in `summary.json`."""
        return self.measure(results)

    def describe(self, results: Sequence[Any]) -> str:
        """Write the metrics of a test set for the screen; a recipe may add the counts."""
        return ", ".join(as_words(metrics_of(type(self)), self.measure(results)))

    @property
    def inactive(self) -> tuple[nn.Module, ...]:
        """Return the modules that the present knobs turn off, which need no gradient."""
        return ()
