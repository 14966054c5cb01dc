"""Whether a run has anything left to train."""

import math
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import CKPT_PREFIX

from sbkit.checkpoint.declaration import CHECKPOINTS
from sbkit.checkpoint.listing import describe, newest_described
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.log import log
from sbkit.logs.metric import BestKey, Metrics, best_key
from sbkit.train.scoring import BEST_EPOCH, metrics_of


def epochs_since_best(checkpoints: Path, key: BestKey) -> int:
    """Count the epochs since the first one with the best figure."""
    ranked = _ranked_epochs(checkpoints, key)
    return max(ranked) - min(ranked.values())[-1] if ranked else 0


def first_best_epoch(checkpoints: Path, key: BestKey, *, epoch: int, value: float) -> int:
    """Return the first epoch with the best figure so far, where ``epoch`` has just reached a value.

    It is saved as BEST_EPOCH: of several epochs with the best figure only the last ones are kept.
    """
    ranked = _ranked_epochs(checkpoints, key)
    return min([*ranked.values(), (*_rank(value, key), epoch)])[-1]


def _ranked_epochs(checkpoints: Path, key: BestKey) -> dict[int, tuple[bool, float, int]]:
    """Return the rank of each epoch's figure, lower is better, and the first epoch that had it."""
    described = filter(None, map(describe, sorted(checkpoints.glob(f"{CKPT_PREFIX}+*"))))
    metas = (each.meta for each in described if each.meta.get("end-of-epoch", True))
    return {
        meta["epoch"]: (*_rank(meta[key.name], key), meta.get(BEST_EPOCH, meta["epoch"]))
        for meta in metas
        if isinstance(meta.get("epoch"), int) and isinstance(meta.get(key.name), int | float)
    }


def _rank(value: float, key: BestKey) -> tuple[bool, float]:
    """Return what is lower the better a figure is; NaN comes last."""
    if math.isnan(value):
        return True, 0.0
    return False, -value if key.max_key else value


def has_stopped_early(checkpoints: Path, metrics: Metrics, patience: int) -> bool:
    """Return whether the first metric is no better since ``patience`` epochs; 0 never stops."""
    return patience > 0 and epochs_since_best(checkpoints, best_key(metrics)) >= patience


def stops_early(brain: Any, patience: int) -> bool:
    """Return whether a Brain trains no further epoch; all ranks agree. 0 never stops."""
    if not patience or brain.checkpointer is None:
        return False
    folder = Path(brain.checkpointer.checkpoints_dir)
    stops: bool = gather_over_ranks(
        rank() == 0 and has_stopped_early(folder, metrics_of(type(brain)), patience)
    )[0]
    if stops:
        name = best_key(metrics_of(type(brain))).name
        log(f"{name} has not improved for {patience} epochs (`early_stopping`): training ends.")
    return stops


def is_finished(
    run_folder: Path, metrics: Metrics, *, number_of_epochs: int, patience: int = 0
) -> bool:
    """Return whether a run has trained its last epoch, or has stopped early.

    Call it before training: afterwards every run is finished.
    """
    newest = newest_described(run_folder / CHECKPOINTS)
    if newest is None or not newest.meta.get("end-of-epoch", True):
        return False
    epoch = newest.meta.get("epoch")
    if isinstance(epoch, int) and epoch >= number_of_epochs:
        return True
    return has_stopped_early(run_folder / CHECKPOINTS, metrics, patience)
