"""Whether a run has anything left to train."""

import math
from pathlib import Path
from typing import Any

from sbkit.checkpoint.declaration import CHECKPOINTS
from sbkit.checkpoint.folder import newest_described
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.log import log
from sbkit.logs.metric import BestKey, best_key
from sbkit.train.scoring import BEST_EPOCH, metrics_of


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
        log(f"{name} has not improved for {patience} epochs (`early_stopping`): training ends.")
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
