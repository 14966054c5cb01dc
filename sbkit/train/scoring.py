"""What the Brain of a recipe defines to be measured, and whether a run has anything left to train.

A Brain without `metrics` is judged by its loss.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from sbkit.checkpoint.folder import newest_described
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.metric import LOSS, BestKey, Metrics, as_words, best_key

logger = logging.getLogger(__name__)

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

    def seconds_of_ending(self, test_share: float) -> float:
        """Estimate what the recipe itself does after the last epoch, beside running the model.

        test_share: how much the test sets hold of what the validation sets do.
        """
        return 0.0

    def described(self, results: Sequence[Any]) -> str:
        """Write what `describe` does, and the metrics that a class below its own has added."""
        owner: Any = next(each for each in type(self).__mro__ if "describe" in vars(each))
        added = type(self).metrics.keys() - owner.metrics.keys() if owner.metrics else ()
        values = {name: value for name, value in self.measured(results).items() if name in added}
        return ", ".join([self.describe(results), *as_words(type(self).metrics, values)])

    @property
    def inactive(self) -> tuple[nn.Module, ...]:
        """Return the modules that the present knobs turn off, which need no gradient."""
        return ()


def first_best_epoch(checkpointer: Any, key: BestKey, *, epoch: int, value: float) -> int:
    """Return the first epoch with the best figure so far, where ``epoch`` has just reached a value.

    Each checkpoint holds it as BEST_EPOCH: of several with the best figure only the last are kept.
    """
    best = checkpointer.find_checkpoint(max_key=key.max_key, min_key=key.min_key)
    if best is None:
        return epoch
    before = best.meta[key.name]
    is_better = value > before if key.max_key else value < before
    return epoch if is_better or math.isnan(before) else best.meta.get(BEST_EPOCH, epoch)


def has_stopped_early(checkpoints: Path, patience: int) -> bool:
    """Return whether no epoch was better since ``patience`` epochs; 0 never stops."""
    newest = newest_described(checkpoints)
    if newest is None or BEST_EPOCH not in newest.meta:
        return False
    return 0 < patience <= int(newest.meta["epoch"]) - int(newest.meta[BEST_EPOCH])


def stops_early(brain: Any, patience: int) -> bool:
    """Return whether a Brain trains no further epoch; all ranks agree. 0 never stops."""
    if not patience or brain.checkpointer is None:
        return False
    folder = Path(brain.checkpointer.checkpoints_dir)
    stops: bool = gather_over_ranks(rank() == 0 and has_stopped_early(folder, patience))[0]
    if stops:
        name = best_key(metrics_of(type(brain))).name
        logger.info(
            f"{name} has not improved for {patience} epochs (`early_stopping`): training ends."
        )
    return stops


def is_finished(run_folder: Path, *, number_of_epochs: int, patience: int = 0) -> bool:
    """Return whether a run has trained its last epoch, or has stopped early.

    Call it before training: afterwards every run is finished.
    """
    newest = newest_described(run_folder / CHECKPOINTS)
    if newest is None or not newest.meta.get("end-of-epoch", True):
        return False
    has_ended = newest.meta.get("epoch", 0) >= number_of_epochs
    return has_ended or has_stopped_early(run_folder / CHECKPOINTS, patience)
