"""The results of validation sets: `Brain` runs the batches, and an `Evaluator` measures them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from sbkit.distributed.ranks import gather_over_ranks
from sbkit.logs.metric import Metrics
from sbkit.models.loss import Loss
from sbkit.train.schedule import Validations


class Evaluator:
    """Collect the results of evaluated splits, and measure them; know when to validate again.

    Attributes:
        metrics: what `measure` computes; the first one ranks checkpoints.
        results: by split, the results of `score`; without metrics the sum and count of each loss.
        interval: optimizer steps between two validations within an epoch; 0 for none.
        loaders: those of the last fit's validation, by split.
        is_current: whether a validation has followed the last step, or the start of the epoch.
        validated_step: the optimizer step of the last validation.
        validations: those of the run so far, for `early_stopping` and an `lr_schedule` that follows
            the metric.

    >>> from sbkit.bundle.task import mean_loss
    >>> from sbkit.logs.metric import LOSS_METRIC
    >>> evaluator = Evaluator(LOSS_METRIC, mean_loss)
    >>> evaluator.start(["dev"])
    >>> evaluator.enter("dev")
    >>> evaluator.add([(6.0, 3.0), (2.0, 1.0)])
    >>> evaluator.measure_splits()
    {'loss': 2.0}
    """

    def __init__(
        self,
        metrics: Metrics,
        measure: Callable[[Sequence[Any]], Mapping[str, float]],
        *,
        interval: int = 0,
    ) -> None:
        self.metrics = metrics
        self._measure = measure
        self.interval = interval
        self.loaders: Mapping[str, Iterable[Any]] = {}
        self.is_current = True
        self.validated_step = 0
        self.validations: Validations = ()
        self.start(())

    def is_due(self, step: int) -> bool:
        """Return whether a validation within an epoch follows the optimizer step."""
        is_new = self.interval > 0 and step % self.interval == 0 and step > self.validated_step
        return is_new and bool(self.loaders)

    def state(self) -> dict[str, Any]:
        return {"validated_step": self.validated_step, "validations": self.validations}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; it is missing in SpeechBrain's checkpoints."""
        self.validated_step = state.get("validated_step", 0)
        self.validations = tuple((epoch, value) for epoch, value in state.get("validations", ()))

    @property
    def stale(self) -> int:
        """The number of validations since the first one of the lowest error."""
        errors = [error for _, error in self.validations]
        lowest = min((error for error in errors if not math.isnan(error)), default=None)
        return 0 if lowest is None else len(errors) - 1 - errors.index(lowest)

    def start(self, splits: Iterable[str]) -> None:
        self.results: dict[str, list[Any]] = defaultdict(list, {name: [] for name in splits})
        self._split = ""

    def enter(self, split: str) -> None:
        self._split = split

    def add(self, results: Iterable[Any]) -> None:
        self.results[self._split].extend(results)

    def measure(self, results: Sequence[Any]) -> dict[str, float]:
        """Return the values of results, the metric that ranks checkpoints first.

        They are NaN without results: nothing is good or bad.
        """
        if not results:
            return dict.fromkeys(self.metrics, math.nan)
        values = {name: float(value) for name, value in self._measure(results).items()}
        best = next(iter(self.metrics))
        return {best: values[best], **values}

    def measure_splits(self) -> dict[str, float]:
        """Measure all utterances of all ranks and, if there are several splits, each split.

        The metrics of a split are named like `dev-clean/WER`. Every rank calls this.
        """
        per_rank = gather_over_ranks(dict(self.results))
        results = {name: [*chain(*(r[name] for r in per_rank))] for name in self.results}
        values = self.measure([result for split in results.values() for result in split])
        if len(results) > 1:
            for split, its_results in results.items():
                measured = self.measure(its_results)
                values |= {f"{split}/{name}": value for name, value in measured.items()}
        return values

    def end_validation(self, epoch: int) -> dict[str, float]:
        """Measure the splits as `measure_splits` does, and add their error to `validations`."""
        values = self.measure_splits()
        self.validations += ((epoch, self.error(values)),)
        return values

    def error(self, values: Mapping[str, float]) -> float:
        """Return the value of the metric that ranks checkpoints, negated if higher is better."""
        name, metric = next(iter(self.metrics.items()))
        return values[name] if metric.lower_is_better else -values[name]


def mean_over_ranks(losses: Sequence[Loss]) -> float:
    """Divide the exact sum of all losses by all counts, however the ranks share the batches."""
    sums = [value for loss in losses for value in loss.sums.tolist()]
    counts = [value for loss in losses for value in loss.counts.tolist()]
    per_rank = gather_over_ranks((sums, counts))
    total = math.fsum(value for sums, _ in per_rank for value in sums)
    labels = math.fsum(value for _, counts in per_rank for value in counts)
    return total / labels if labels else math.nan
