"""Save and load what a run consists of, by SpeechBrain's hooks: whole checkpoints or none.

SpeechBrain's Checkpointer writes its marker file first, so a killed save looks like a good
checkpoint. This one fills a folder under another name, adds checksums, and renames it.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    get_default_hook,
    torch_recovery,
)
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.distributed import MainProcessContext
from torch import nn
from torch.optim import Optimizer

from sbkit.base.errors import ConfigError, SbkitError, translate
from sbkit.base.files import parsing_errors
from sbkit.base.process import SAVED_FILE
from sbkit.base.stores import wait_for_store
from sbkit.checkpoint.folder import (
    CHECKPOINT_FORMAT,
    END_OF_EPOCH,
    FORMAT,
    META_FILE,
    PREFIX,
    SUFFIX,
    Checkpoint,
    locked_folder,
    publish,
    remove_unfinished,
    staging_path,
)
from sbkit.checkpoint.ranking import (
    AveragedCheckpoints,
    Importance,
    Predicate,
    SavedCheckpoints,
    date_of,
)
from sbkit.checkpoint.weights import (
    CHECKPOINT_CONTENT,
    DECLARED_KEY,
    add_declared,
    average_checkpoints,
    check_fits,
    read_weights,
    restore_declared,
)
from sbkit.distributed.ranks import gather_over_ranks, raise_on_all_ranks, rank, rank0_then_others

logger = logging.getLogger(__name__)

SAVE_ERRORS = (OSError, RuntimeError)  # torch.save raises the latter on a full disk


class Checkpointer(SpeechBrainCheckpointer):  # type: ignore[misc]
    """Save and recover as SpeechBrain does, but never half a checkpoint and never a damaged one.

    The objects that it saves, its recoverables, and how each is saved and loaded, their hooks, are
    registered as in SpeechBrain. Its folders are read, too.

    Attributes:
        saved: the checkpoints in the folder. Reading never changes it.
        meta: values that are written into every checkpoint's meta file.
        is_within_epoch: whether a saved position lies within an epoch.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     checkpointer = Checkpointer(folder, recoverables={"model": nn.Linear(2, 1)})
    ...     checkpoint = checkpointer.save_checkpoint(meta={"CER": 0.1})
    ...     checkpointer.find_checkpoint(min_key="CER").meta["CER"]
    0.1
    """

    def __init__(
        self,
        checkpoints_dir: str | Path,
        recoverables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checkpoints_dir, recoverables, **options)
        for name, recoverable in self.recoverables.items():
            has_hook = isinstance(recoverable, (*DEFAULT_SAVE_HOOKS,))
            if name not in self.custom_save_hooks and not has_hook:
                kind = type(recoverable).__name__
                raise ConfigError(f"SpeechBrain cannot save the recoverable `{name}`, a {kind}.")
            self.add_recoverable(name, recoverable)  # SpeechBrain forgets that none is optional
        self.saved = SavedCheckpoints(self.checkpoints_dir)
        self.meta: dict[str, Any] = {}
        self.is_within_epoch = False
        self._is_claimed = False

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

    def save_checkpoint(
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        verbosity: int = logging.DEBUG,
    ) -> Checkpoint | None:
        """Save a whole checkpoint or none; return it on rank 0, None elsewhere.

        meta: values of the meta file.
        end_of_epoch: what loaders and counters are told when they are loaded.
        name: of the folder, after its prefix; by default the date.
        """

        def describe(error: Exception) -> str:
            return (
                f"Writing a checkpoint to {self.checkpoints_dir} failed ({error}). Make room, and "
                "rerun the same command."
            )

        checkpoint: Checkpoint | None = None
        save_errors = translate(SAVE_ERRORS, SbkitError, describe)
        with self.claimed(), raise_on_all_ranks(SbkitError), save_errors:
            if rank() == 0:
                save = partial(self._save_whole, meta or {}, end_of_epoch, name, verbosity)
                try:
                    checkpoint = save()
                except SAVE_ERRORS as error:  # a disk may fail for a moment
                    logger.warning(f"Saving failed ({error}). Trying once more.")
                    checkpoint = wait_for_store(save)
        if SAVED_FILE in os.environ and self.recoverables:  # the check saves without recoverables
            Path(os.environ[SAVED_FILE]).touch()
        return checkpoint

    def _save_whole(
        self, meta: Mapping[str, Any], end_of_epoch: bool, name: str | None, verbosity: int
    ) -> Checkpoint:
        """Save on this rank, or remove the unfinished folder and raise one of SAVE_ERRORS."""
        # Dated later than all others even if the clock went back: dates order them.
        latest = max(map(date_of, self.saved.all()), default=0.0)
        meta = {
            "unixtime": max(time.time(), math.nextafter(latest, math.inf)),
            END_OF_EPOCH: end_of_epoch and not self.is_within_epoch,
            FORMAT: CHECKPOINT_FORMAT,
            **self.meta,
            **meta,
        }
        folder = self.checkpoints_dir / f"{PREFIX}{name or self._dated_name()}"
        staged = staging_path(folder)
        try:
            with MainProcessContext():  # otherwise a hook of SpeechBrain's waits for other ranks
                staged.mkdir(parents=True, exist_ok=True)
                (staged / META_FILE).write_text(yaml.dump(meta), "utf-8")
                for recoverable in self.recoverables:
                    self._save_recoverable(recoverable, staged / f"{recoverable}{SUFFIX}")
                checkpoint = publish(staged, folder, meta)
                logger.log(verbosity, f"Saved {folder}")
                if INTRA_EPOCH_CKPT_FLAG not in meta:  # it replaces unvalidated ones
                    for earlier in self.saved.all():
                        if INTRA_EPOCH_CKPT_FLAG in earlier.meta:
                            shutil.rmtree(earlier.path)
        except SAVE_ERRORS:
            remove_unfinished(self.checkpoints_dir)
            raise
        return checkpoint

    def _dated_name(self) -> str:
        stamp = time.strftime("%Y-%m-%d+%H-%M-%S")
        names = (f"{stamp}+{number:02d}" for number in count())
        return next(n for n in names if not (self.checkpoints_dir / f"{PREFIX}{n}").exists())

    def _save_recoverable(self, name: str, file: Path) -> None:
        recoverable = self.recoverables[name]
        hook = self.custom_save_hooks.get(name)
        hook = hook or get_default_hook(recoverable, DEFAULT_SAVE_HOOKS)
        if hook is None:
            kind = type(recoverable).__name__
            raise ConfigError(f"SpeechBrain cannot save the recoverable `{name}`, a {kind}.")
        hook(recoverable, file)

    def save_and_keep_only(
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        num_to_keep: int = 1,
        keep_recent: bool = True,
        importance_keys: Sequence[Importance] = (),
        max_keys: Sequence[str] = (),
        min_keys: Sequence[str] = (),
        ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.DEBUG,
    ) -> None:
        """Save, and delete checkpoints that are neither the best nor the newest.

        The arguments are those of `save_checkpoint` and `delete_checkpoints`.
        """
        self.save_checkpoint(meta, end_of_epoch, name, verbosity)
        self.delete_checkpoints(
            num_to_keep=num_to_keep,
            max_keys=max_keys,
            min_keys=min_keys,
            importance_keys=[*importance_keys, *([date_of] if keep_recent else [])],
            ckpt_predicate=ckpt_predicate,
            verbosity=verbosity,
        )

    def delete_checkpoints(
        self,
        *,
        num_to_keep: int = 1,
        min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None,
        importance_keys: Sequence[Importance] = (date_of,),
        ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.DEBUG,
    ) -> None:
        """Delete all that have one of the keys, but are not among its best; all ranks call this.

        num_to_keep: of each key.
        ckpt_predicate: is true for those that may be deleted.
        """
        keys: list[dict[str, Any]] = [
            *({"min_key": key} for key in min_keys or ()),
            *({"max_key": key} for key in max_keys or ()),
            *({"importance_key": key} for key in importance_keys),
        ]
        with rank0_then_others():  # else another rank would list what is being deleted
            if rank() == 0:
                rankings = [self.saved.find(ckpt_predicate=ckpt_predicate, **key) for key in keys]
                kept = {best.path for ranked in rankings for best in ranked[:num_to_keep]}
                found = {checkpoint.path for ranked in rankings for checkpoint in ranked}
                for folder in sorted(found - kept):
                    shutil.rmtree(folder)
                    logger.log(verbosity, f"Deleted {folder}")

    # ---- finding

    def list_checkpoints(self) -> list[Checkpoint]:
        return self.saved.all()

    def find_checkpoints(
        self, *, max_num_checkpoints: int | None = None, **keys: Any
    ) -> list[Checkpoint]:
        """Find checkpoints, the best first; see `SavedCheckpoints.find`."""
        return self.saved.find(**keys)[:max_num_checkpoints]

    # ---- loading

    def recover_if_possible(self, **keys: Any) -> Checkpoint | None:
        """Load the first undamaged checkpoint in the requested order; log the damaged ones."""
        best = self.saved.find_whole(1, **keys)
        if not best:
            return None
        self.load_checkpoint(best[0])
        return best[0]

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; for a checkpoint of another model, raise and list differences.

        Optimizers then get their declared hyperparameters again.
        """
        self.check_weights(checkpoint)
        optimizers = [r for r in self.recoverables.values() if isinstance(r, Optimizer)]
        declared = [[group[DECLARED_KEY] for group in o.param_groups] for o in optimizers]
        fix = f"Restore it, or move {checkpoint.path} away to resume from the previous checkpoint."
        logger.debug(f"Loading {checkpoint.path}")
        with parsing_errors(checkpoint.path, CHECKPOINT_CONTENT, fix=fix):
            for name in self.recoverables:
                self._load_recoverable(name, checkpoint)
        for optimizer, groups in zip(optimizers, declared, strict=True):
            restore_declared(optimizer, groups, checkpoint=checkpoint.path)

    def _load_recoverable(self, name: str, checkpoint: Checkpoint) -> None:
        file = checkpoint.paramfiles.get(name)
        if file is None:
            # As in SpeechBrain, a loader may be new
            if not (
                self.allow_partial_load or self.optional_recoverables[name] or "dataloader" in name
            ):
                raise RuntimeError(f"it has no `{name}`")
            logger.info(f"note: {checkpoint.path} has no `{name}`, which stays as it is.")
            return
        recoverable = self.recoverables[name]
        hook = self.custom_load_hooks.get(name)
        hook = hook or get_default_hook(recoverable, DEFAULT_LOAD_HOOKS)
        if hook is None:
            kind = type(recoverable).__name__
            raise RuntimeError(f"SpeechBrain cannot load the recoverable `{name}`, a {kind}")
        hook(recoverable, file, checkpoint.meta[END_OF_EPOCH])

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that are saved as a state_dict, not by hooks of their own."""
        custom = {**self.custom_load_hooks, **self.custom_save_hooks}
        return {
            name: recoverable
            for name, recoverable in self.recoverables.items()
            if isinstance(recoverable, nn.Module)
            and name not in custom
            and get_default_hook(recoverable, DEFAULT_LOAD_HOOKS) is torch_recovery
        }

    def check_weights(self, checkpoint: Checkpoint) -> None:
        """Raise BundleError for a checkpoint whose weights do not fit the modules."""
        for name, module in self.modules().items():
            if name in checkpoint.paramfiles:
                weights = read_weights(checkpoint.paramfiles[name])
                check_fits(weights, module, place=str(checkpoint.path))

    def check_same_model(self) -> None:
        """Claim the folder, and refuse the checkpoints of another model."""
        with self.claimed():
            for checkpoint in self.saved.find_whole(1):
                self.check_weights(checkpoint)

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
        ranked = self.saved.find_whole(count, **keys)
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

    def _load_mean(self, checkpoints: Sequence[Checkpoint]) -> None:
        for name, module in self.modules().items():
            mean = average_checkpoints(checkpoints, name)
            check_fits(mean, module, place=str(self.checkpoints_dir))
            module.load_state_dict(mean)
