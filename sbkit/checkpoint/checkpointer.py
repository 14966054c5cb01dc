"""Checkpoints that are whole or absent, and the average of the best ones.

SpeechBrain's Checkpointer writes its marker file first, so a killed save looks like a good
checkpoint. This one fills a folder under another name, adds checksums, and renames it.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from speechbrain.core import INTRA_EPOCH_CKPT_FLAG
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, METAFNAME, Checkpoint
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.distributed import MainProcessContext
from torch.optim import Optimizer

from sbkit.base.checksums import CHECKSUMS, find_damage
from sbkit.base.errors import BundleError, ConfigError, SbkitError, translate
from sbkit.base.files import from_plain, parsing_errors, read_file, to_json, write_text_atomically
from sbkit.base.process import SAVED_FILE
from sbkit.base.stores import wait_for_store
from sbkit.checkpoint.folder import (
    CHECKPOINT_FORMAT,
    FORMAT,
    checkpoint_folders,
    locked_folder,
    publish,
    read_checkpoint,
    remove_unfinished,
    staging_path,
)
from sbkit.checkpoint.weights import (
    CHECKPOINT_CONTENT,
    DECLARED_KEY,
    add_declared,
    average_checkpoints,
    check_fits,
    check_weights,
    modules_of,
    restore_declared,
)
from sbkit.distributed.ranks import gather_over_ranks, raise_on_all_ranks, rank, rank0_then_others

logger = logging.getLogger(__name__)

# Keys of a checkpoint's meta file: the metric that ranks it, the text table, the task, its parts
RANKED_BY, NORMALIZER, PARTS = "ranked_by", "normalizer", "parts"
SAVE_ERRORS = (OSError, RuntimeError)  # torch.save raises the latter on a full disk
AVERAGED_FILE = "averaged.json"  # in the folder of the checkpoints


@dataclass(frozen=True)
class AveragedCheckpoints:
    """The checkpoints that a run is tested and exported with.

    The mean of the last weights of a converged run beats each of them, but the mean over a run that
    was still learning is worse than its best checkpoint. So the mean of all candidates, of the
    better half, of the best quarter and so on down to the single best one are validated, and the
    best mean is used (model soups, Wortsman et al. 2022, with fewer trials, since a validation set
    is small).

    Attributes:
        checkpoints: names of their folders, the best first.
        candidates: names of all folders that they were chosen from, the best first.
        errors: on the validation set, by the number of checkpoints averaged.
    """

    checkpoints: tuple[str, ...]
    candidates: tuple[str, ...]
    errors: dict[str, float]

    def __str__(self) -> str:
        count = len(self.checkpoints)
        tested = "the best checkpoint"
        if count > 1:
            tested = f"the mean of the {count} best checkpoints"
        if not self.errors:
            return f"tested: {tested}"
        errors = ", ".join(f"{error:.4f} with {count}" for count, error in self.errors.items())
        return (
            f"tested: {tested} of {len(self.candidates)} (on validation, lower is better: {errors})"
        )

    def write(self, folder: Path | str) -> None:
        """Write the choice beside the checkpoints, for export and for a repeated test."""
        content = {"checkpoints": self.checkpoints, "of": self.candidates, "scores": self.errors}
        write_text_atomically(Path(folder, AVERAGED_FILE), to_json(content, indent=1) + "\n")

    @staticmethod
    def read(folder: Path | str) -> "AveragedCheckpoints | None":
        """Read the choice from the folder of a run's checkpoints; None if there is no choice."""
        file = Path(folder, AVERAGED_FILE)
        if not file.exists():
            return None
        with parsing_errors(file, "be what training wrote", fix="Remove it.", is_json=True):
            content = json.loads(read_file(file))
            content["candidates"] = content.pop("of")
            content["errors"] = content.pop("scores")
            return from_plain(AveragedCheckpoints, content)


class Checkpointer(SpeechBrainCheckpointer):  # type: ignore[misc]
    """Save and recover as SpeechBrain does, but never half a checkpoint and never a damaged one.

    Reading never changes the folder, so a run may be training in it.

    Attributes:
        meta: values that are written into every checkpoint's meta file.
        is_within_epoch: whether a saved position lies within an epoch.

    >>> from tempfile import TemporaryDirectory
    >>> from torch import nn
    >>> with TemporaryDirectory() as folder:
    ...     checkpointer = Checkpointer(folder, recoverables={"model": nn.Linear(2, 1)})
    ...     checkpoint = checkpointer.save_checkpoint(meta={"CER": 0.1})
    ...     checkpointer.find_checkpoint(min_key="CER").meta["CER"]
    0.1
    """

    def __init__(self, checkpoints_dir: str | Path, **options: Any) -> None:
        super().__init__(checkpoints_dir, **options)
        for name, recoverable in self.recoverables.items():
            has_hook = isinstance(recoverable, (*DEFAULT_SAVE_HOOKS,))
            if name not in self.custom_save_hooks and not has_hook:
                kind = type(recoverable).__name__
                raise ConfigError(f"SpeechBrain cannot save the recoverable `{name}`, a {kind}.")
            self.add_recoverable(name, recoverable)  # SpeechBrain forgets that none is optional
        self._is_claimed = False
        self.meta: dict[str, Any] = {}
        self.is_within_epoch = False
        self._logged: set[str] = set()

    def add_recoverable(self, name: str, obj: Any, *hooks: Any, **options: Any) -> None:
        super().add_recoverable(name, obj, *hooks, **options)
        if isinstance(obj, Optimizer):
            add_declared(obj)

    # ---- saving

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder unless it is locked, and clean up after a killed run; on all ranks."""
        with ExitStack() as lock:
            if not self._is_claimed:
                with rank0_then_others():
                    if rank() == 0:
                        lock.enter_context(locked_folder(self.checkpoints_dir))
                        remove_unfinished(self.checkpoints_dir)
                self._is_claimed = True
                lock.callback(setattr, self, "_is_claimed", False)
            yield

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Checkpoint | None:
        """Save a whole checkpoint or none; return it on rank 0, None elsewhere."""

        def describe(error: Exception) -> str:
            return (
                f"Writing a checkpoint to {self.checkpoints_dir} failed ({error}). Make room, and "
                "rerun the same command."
            )

        checkpoint: Checkpoint | None = None
        save_errors = translate(SAVE_ERRORS, SbkitError, describe)
        with self.claimed(), raise_on_all_ranks(SbkitError), save_errors:
            if rank() == 0:
                save = partial(self._save_whole, *arguments, **options)
                try:
                    checkpoint = save()
                except SAVE_ERRORS as error:  # a disk may fail for a moment
                    logger.warning(f"Saving failed ({error}). Trying once more.")
                    checkpoint = wait_for_store(save)
        if SAVED_FILE in os.environ and self.recoverables:  # the check saves without recoverables
            Path(os.environ[SAVED_FILE]).touch()
        return checkpoint

    def _save_whole(self, *arguments: Any, **options: Any) -> Checkpoint:
        """Save on this rank, or remove the unfinished folder and raise one of SAVE_ERRORS."""
        try:
            with MainProcessContext():  # otherwise SpeechBrain waits for a rank that failed
                checkpoint = publish(super().save_checkpoint(*arguments, **options))
                if INTRA_EPOCH_CKPT_FLAG not in checkpoint.meta:  # it replaces unvalidated ones
                    self.delete_checkpoints(
                        num_to_keep=0,
                        ckpt_predicate=lambda checkpoint: INTRA_EPOCH_CKPT_FLAG in checkpoint.meta,
                    )
        except SAVE_ERRORS:
            remove_unfinished(self.checkpoints_dir)
            raise
        return checkpoint

    def save_and_keep_only(
        self, *arguments: Any, importance_keys: Sequence[Any] = (), **options: Any
    ) -> None:
        """Save, and delete checkpoints that are neither the best nor the newest.

        SpeechBrain's method appends to its own default list, so that each save takes longer.
        """
        super().save_and_keep_only(*arguments, importance_keys=[*importance_keys], **options)

    # ---- recovering

    def recover_if_possible(self, **keys: Any) -> Checkpoint | None:
        """Load the first undamaged checkpoint in the requested order; log the damaged ones."""
        best = self.find_whole(1, **keys)
        if not best:
            return None
        self.load_checkpoint(best[0])
        return best[0]

    def find_checkpoints(
        self, *, max_key: str | None = None, min_key: str | None = None, **keys: Any
    ) -> list[Checkpoint]:
        """Rank by a value of the meta file; NaN, the metric of data without labels, comes last."""
        if key := max_key or min_key:

            def rank_by_key(checkpoint: Checkpoint) -> float:
                value = float(checkpoint.meta[key]) * (1 if max_key else -1)
                return -math.inf if math.isnan(value) else value

            predicate = keys.pop("ckpt_predicate", None) or bool
            keys["ckpt_predicate"] = lambda checkpoint: (
                key in checkpoint.meta and predicate(checkpoint)
            )
            keys["importance_key"] = rank_by_key
        ranked: list[Checkpoint] = super().find_checkpoints(**keys)
        return ranked

    def find_whole(self, count: int, **keys: Any) -> list[Checkpoint]:
        """Find the ``count`` best undamaged checkpoints, and log better ones that are damaged."""
        folders = checkpoint_folders(self.checkpoints_dir)
        for folder in folders:
            if read_checkpoint(folder) is None:
                self._log_once(f"{folder} is skipped: its {METAFNAME} cannot be read.")
        undamaged = list(islice(filter(self._is_whole, self.find_checkpoints(**keys)), count))
        if folders and not undamaged:
            raise BundleError(
                f"{self.checkpoints_dir} has only damaged checkpoints ({len(folders)}). Move the "
                "folder away to start over."
            )
        return undamaged

    def load_average(
        self, count: int, compute_error: Callable[[], float] | None = None, **keys: Any
    ) -> AveragedCheckpoints | None:
        """Average the best checkpoints, at most ``count``, and load the mean with the lowest error.

        Return None if there is no checkpoint.

        compute_error: returns the error of the loaded modules on the validation set, such as the
            CER, or NaN if there is none. Every rank calls it, unless the same checkpoints were
            validated before. Without it, all ``count`` checkpoints are averaged. Of means with
            equal errors, the one over the most checkpoints is chosen.
        keys: rank the checkpoints, as in `find_checkpoints`.
        """
        ranked = self.find_whole(count, **keys)
        if not ranked:
            return None
        # Every rank uses what rank 0 reads: a slower one would read what rank 0 has just written.
        earlier = gather_over_ranks(AveragedCheckpoints.read(self.checkpoints_dir))[0]
        names = tuple(checkpoint.path.name for checkpoint in ranked)
        averaged = AveragedCheckpoints(names, names, {})
        if compute_error is not None and earlier is not None and earlier.candidates == names:
            averaged = earlier
        elif compute_error is not None and len(ranked) > 1:
            errors: dict[int, float] = {}
            for num_halvings in range(len(ranked).bit_length()):
                count = len(ranked) >> num_halvings
                self._load_mean(ranked[:count])
                errors[count] = compute_error()
            counts = [count for count in errors if not math.isnan(errors[count])]
            best = min(counts, key=lambda count: (errors[count], -count), default=1)
            by_count = {str(count): errors[count] for count in counts}  # JSON has no NaN
            averaged = AveragedCheckpoints(names[:best], names, by_count)
        with rank0_then_others():
            if rank() == 0 and averaged is not earlier:
                averaged.write(self.checkpoints_dir)
        self._load_mean(ranked[: len(averaged.checkpoints)])
        return averaged

    def find_averaged(self, **keys: Any) -> list[Checkpoint]:
        """Find the checkpoints that the test averaged; without a current choice, only the best one.

        Without keys, checkpoints are ranked by the metric of the recipe that saved them.
        """
        keys = keys or self.ranked_by()
        averaged = AveragedCheckpoints.read(self.checkpoints_dir)
        if averaged is not None:
            ranked = self.find_whole(len(averaged.candidates), **keys)
            if tuple(checkpoint.path.name for checkpoint in ranked) == averaged.candidates:
                return ranked[: len(averaged.checkpoints)]
        return self.find_whole(1, **keys)

    def ranked_by(self) -> dict[str, str]:
        """Return the metric that the checkpoints are ranked by, as `max_key` or `min_key`."""
        ranked = (checkpoint.meta.get(RANKED_BY) for checkpoint in self.list_checkpoints())
        keys: dict[str, str | None] = next(filter(None, ranked), {})
        return {direction: name for direction, name in keys.items() if name}

    def _load_mean(self, checkpoints: Sequence[Checkpoint]) -> None:
        for name, module in modules_of(self).items():
            mean = average_checkpoints(checkpoints, name)
            check_fits(mean, module, place=str(self.checkpoints_dir))
            module.load_state_dict(mean)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; for a checkpoint of another model, raise and list differences."""
        check_weights(self, checkpoint)
        super().load_checkpoint(checkpoint)

    def check_same_model(self) -> None:
        """Claim the folder, and refuse the checkpoints of another model."""
        with self.claimed():
            for checkpoint in self.find_whole(1):
                check_weights(self, checkpoint)

    # ---- called by SpeechBrain's methods

    def _call_load_hooks(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; optimizers then get their declared hyperparameters again."""
        optimizers = [r for r in self.recoverables.values() if isinstance(r, Optimizer)]
        declared = [[group[DECLARED_KEY] for group in o.param_groups] for o in optimizers]
        fix = f"Restore it, or move {checkpoint.path} away to resume from the previous checkpoint."
        with parsing_errors(checkpoint.path, CHECKPOINT_CONTENT, fix=fix):
            super()._call_load_hooks(checkpoint)
        for optimizer, groups in zip(optimizers, declared, strict=True):
            restore_declared(optimizer, groups, checkpoint=checkpoint.path)

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.path / CHECKSUMS).exists():
            self._log_once(f"{checkpoint.path} has no checksums: SpeechBrain saved it.")
            return True
        damage = find_damage(checkpoint.path)
        if damage is not None:
            self._log_once(f"{checkpoint.path} is skipped: {damage}. Trying the next best.")
        return damage is None

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)

    @staticmethod
    def _construct_checkpoint_objects(folders: Iterable[Path]) -> list[Checkpoint]:
        return [*filter(None, map(read_checkpoint, folders))]

    def _save_checkpoint_metafile(
        self, file: Path, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True
    ) -> Mapping[str, Any]:
        """Date a checkpoint later than all others even if the clock went back: dates order them."""
        dates = (checkpoint.meta["unixtime"] for checkpoint in self.list_checkpoints())
        latest = max(dates, default=0.0)
        date = {"unixtime": max(time.time(), math.nextafter(latest, math.inf))}
        added = {**date, FORMAT: CHECKPOINT_FORMAT, **self.meta, **(meta or {})}
        end_of_epoch = end_of_epoch and not self.is_within_epoch
        written: Mapping[str, Any] = super()._save_checkpoint_metafile(file, added, end_of_epoch)
        return written

    def _new_checkpoint_dirpath(self) -> Path:
        return staging_path(super()._new_checkpoint_dirpath())

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        return staging_path(super()._custom_checkpoint_dirpath(name))
