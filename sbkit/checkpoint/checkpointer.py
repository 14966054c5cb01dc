"""Checkpoints that are whole or absent.

SpeechBrain's Checkpointer writes its marker file first, so a killed save looks like a good
checkpoint. This one writes a folder beside, checksums it, and renames it: the name is the marker.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, METAFNAME, Checkpoint
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.distributed import MainProcessContext
from torch.optim import Optimizer

from sbkit.base.checksums import CHECKSUMS, SAVED, find_damage
from sbkit.base.errors import SbkitError
from sbkit.base.files import reading
from sbkit.checkpoint.averaging import Averaged, choose, read_averaged, write_averaged
from sbkit.checkpoint.folder import (
    checkpoint_folders,
    describe,
    hold,
    publish,
    remove_unfinished,
    staging_path,
)
from sbkit.checkpoint.weights import (
    average,
    check_same_model,
    check_weights,
    modules_of,
    restore_declared,
)
from sbkit.distributed.ranks import gather_over_ranks, leave_together, main_rank_first, rank

logger = logging.getLogger(__name__)

# Of a checkpoint's meta file: the metric that chooses the best one, the text table, the task
RANKED_BY, NORMALIZER, TASK = "ranked_by", "normalizer", "task"


class Checkpointer(SpeechBrainCheckpointer):  # type: ignore[misc]
    """Save and recover as SpeechBrain does, but never half a checkpoint and never a damaged one.

    Reading leaves the folder as it is, also while a run is training in it.
    """

    def __init__(self, checkpoints_dir: str | Path, **options: Any) -> None:
        """Take SpeechBrain's options; raises SbkitError for a recoverable that cannot be saved."""
        super().__init__(checkpoints_dir, **options)
        for name, each in self.recoverables.items():
            if name not in self.custom_save_hooks and not isinstance(each, (*DEFAULT_SAVE_HOOKS,)):
                raise SbkitError(
                    f"Recoverables must be modules or other objects that SpeechBrain can save, but "
                    f"`{name}` is a {type(each).__name__}. Take it out of the recoverables."
                )
        self.optional_recoverables = dict.fromkeys(self.recoverables, False)  # SpeechBrain forgets
        self._is_claimed = False
        self.meta: dict[str, Any] = {}  # written into every checkpoint
        self._logged: set[str] = set()

    # -- saving -------------------------------------------------------------------------------

    def claim(self) -> None:
        """Lock the folder for this run, on all ranks, and remove what a killed one left.

        Raises SbkitError when another run is saving there.
        """
        if self._is_claimed:
            return
        with main_rank_first():
            if rank() == 0:
                hold(self.checkpoints_dir)
                remove_unfinished(self.checkpoints_dir)
        self._is_claimed = True

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Checkpoint | None:
        """Save beside, checksum, and rename; give the checkpoint on rank 0, None elsewhere."""
        self.claim()
        checkpoint: Checkpoint | None = None
        trouble: SbkitError | None = None
        try:
            if rank() == 0:
                with MainProcessContext():  # else it waits for a rank that failed
                    checkpoint = publish(super().save_checkpoint(*arguments, **options))
        except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
            trouble = SbkitError(
                f"A checkpoint must be written whole, but writing to {self.checkpoints_dir} failed "
                f"({error}). What was saved before is untouched: make room there if "
                "that is it, and start again."
            )
            trouble.__cause__ = error
            remove_unfinished(self.checkpoints_dir)
        leave_together(trouble)
        return checkpoint

    def save_and_keep_only(
        self, *arguments: Any, importance_keys: Sequence[Any] = (), **options: Any
    ) -> None:
        """Save, and delete what is neither best nor recent.

        SpeechBrain's appends to its own default list, so every save takes longer than the last.
        """
        super().save_and_keep_only(*arguments, importance_keys=[*importance_keys], **options)

    # -- recovering ---------------------------------------------------------------------------

    def recover_if_possible(self, **keys: Any) -> Checkpoint | None:
        """Load the first in the order asked for that is undamaged, and say which ones are not."""
        best = self.find_whole(1, **keys)
        if not best:
            return None
        self.load_checkpoint(best[0])
        return best[0]

    def find_checkpoints(
        self, *, max_key: str | None = None, min_key: str | None = None, **keys: Any
    ) -> list[Checkpoint]:
        """Rank by a number of the meta file; NaN, as of data without labels, comes last."""
        if key := max_key or min_key:

            def rank_by_key(each: Checkpoint) -> float:
                value = float(each.meta[key])
                return -math.inf if math.isnan(value) else value if max_key else -value

            also = keys.pop("ckpt_predicate", None) or bool
            keys["ckpt_predicate"] = lambda each: key in each.meta and also(each)
            keys["importance_key"] = rank_by_key
        ranked: list[Checkpoint] = super().find_checkpoints(**keys)
        return ranked

    def find_whole(self, count: int, **keys: Any) -> list[Checkpoint]:
        """Find the ``count`` best undamaged checkpoints, and say which better ones are damaged.

        Raises SbkitError when there are checkpoints and all of them are damaged.
        """
        folders = checkpoint_folders(self.checkpoints_dir)
        for folder in folders:
            if describe(folder) is None:
                self._log_once(f"{folder} is skipped: its {METAFNAME} cannot be read.")
        whole = list(islice(filter(self._is_whole, self.find_checkpoints(**keys)), count))
        if folders and not whole:
            raise SbkitError(
                f"At least one checkpoint in {self.checkpoints_dir} must be whole, but all "
                f"{len(folders)} are damaged. Restore one, or move the folder away to start over."
            )
        return whole

    def load_average(
        self, count: int, score: Callable[[], float] | None = None, **keys: Any
    ) -> Averaged | None:
        """Load the modules with mean weights of best checkpoints: as many as score best.

        score(): the error of the loaded modules on the validation set, lower is better; every
        rank calls it. It is not called where the choice was made before, from the same
        checkpoints; without it all ``count`` are taken. Returns None when there are none.
        """
        ranked = self.find_whole(count, **keys)
        if not ranked:
            return None
        # Rank 0's reading for all: a slower rank would find what rank 0 has just written.
        known = gather_over_ranks(read_averaged(self.checkpoints_dir))[0]
        names = tuple(each.path.name for each in ranked)
        if score is None:
            averaged = Averaged(names, names, {})
        elif known is not None and known.of == names:
            averaged = known
        else:

            def score_mean(count: int) -> float:
                self._load_mean(ranked[:count])
                return score()

            averaged = choose(ranked, score_mean)
            with main_rank_first():
                if rank() == 0:
                    write_averaged(self.checkpoints_dir, averaged)
        self._load_mean(ranked[: len(averaged.checkpoints)])
        return averaged

    def find_averaged(self, **keys: Any) -> list[Checkpoint]:
        """Find the checkpoints that the test averaged; without a valid choice, the best alone.

        Without keys they are ranked by the metric of the recipe that saved them.
        """
        keys = keys or self.ranked_by()
        averaged = read_averaged(self.checkpoints_dir)
        if averaged is not None:
            ranked = self.find_whole(len(averaged.of), **keys)
            if tuple(each.path.name for each in ranked) == averaged.of:
                return ranked[: len(averaged.checkpoints)]
        return self.find_whole(1, **keys)

    def ranked_by(self) -> dict[str, str]:
        """Return the metric that the checkpoints were saved with as `max_key` or `min_key`."""
        ranked = (each.meta.get(RANKED_BY) for each in self.list_checkpoints())
        key: dict[str, str | None] = next(filter(None, ranked), {})
        return {direction: name for direction, name in key.items() if name}

    def _load_mean(self, best: Sequence[Checkpoint]) -> None:
        for name, module in modules_of(self).items():
            mean = average(best, name)
            check_same_model(mean, module.state_dict(), of=str(self.checkpoints_dir))
            module.load_state_dict(mean)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; refuse a checkpoint of another model by naming what differs."""
        check_weights(self, checkpoint)
        super().load_checkpoint(checkpoint)

    def check_same_model(self) -> None:
        """Claim the folder, and refuse one of another model, before it is used."""
        self.claim()
        for checkpoint in self.find_whole(1):
            check_weights(self, checkpoint)

    # -- inside -------------------------------------------------------------------------------

    def _call_load_hooks(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; optimizers with their moments and the declared parameters."""
        optimizers = [each for each in self.recoverables.values() if isinstance(each, Optimizer)]
        declared = [[dict(group) for group in each.param_groups] for each in optimizers]
        fix = f"Restore it, or move {checkpoint.path} away to go on from the one before."
        with reading(checkpoint.path, must=SAVED, fix=fix):
            super()._call_load_hooks(checkpoint)
        for each, groups in zip(optimizers, declared, strict=True):
            restore_declared(each, groups, of=checkpoint.path)

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.path / CHECKSUMS).exists():
            self._log_once(
                f"{checkpoint.path} has no checksums, as SpeechBrain leaves it; it is taken."
            )
            return True
        damage = find_damage(checkpoint.path)
        if damage is not None:
            self._log_once(f"{checkpoint.path} is skipped: {damage}. Trying the next best.")
        return damage is None

    def _log_once(self, message: str) -> None:
        """Log a warning once, however often the folder is read."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)

    @staticmethod
    def _construct_checkpoint_objects(folders: Iterable[Path]) -> list[Checkpoint]:
        described = map(describe, folders)
        return [checkpoint for checkpoint in described if checkpoint is not None]

    def _save_checkpoint_metafile(
        self, file: Path, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True
    ) -> Mapping[str, Any]:
        """Date it later than all that are there, whatever the clock says: the order is progress."""
        latest = max((each.meta["unixtime"] for each in self.list_checkpoints()), default=0.0)
        date = {"unixtime": max(time.time(), math.nextafter(latest, math.inf))}
        added = {**date, **self.meta, **(meta or {})}
        written: Mapping[str, Any] = super()._save_checkpoint_metafile(file, added, end_of_epoch)
        return written

    def _new_checkpoint_dirpath(self) -> Path:
        return staging_path(super()._new_checkpoint_dirpath())

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        return staging_path(super()._custom_checkpoint_dirpath(name))
