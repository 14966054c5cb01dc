"""Checkpoints that are whole or absent.

SpeechBrain's Checkpointer writes its marker file first, so a killed save looks like a good
checkpoint. This one writes a folder beside, checksums it, and renames it: the name is the marker.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils import distributed
from speechbrain.utils.checkpoints import Checkpoint
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from yaml import YAMLError

from sbkit.tensors.distributed import gather_over_ranks, rank
from sbkit.tensors.log import say
from sbkit.values.errors import BAD_INPUT, SbkitError
from sbkit.values.files import fsync_tree, write_text_atomically

CHECKSUMS = "checksums.json"
UNFINISHED = ".unfinished-"  # prefix of a folder that is still being written


class Checkpointer(SpeechBrainCheckpointer):  # type: ignore[misc]
    """Save and recover as SpeechBrain does, but never half a checkpoint and never a damaged one."""

    def __init__(self, checkpoints_dir: str | Path, **options: Any) -> None:
        super().__init__(checkpoints_dir, **options)
        self._remove_unfinished()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Checkpoint | None:
        """Save beside, checksum, and rename; give the checkpoint on rank 0, None elsewhere."""
        checkpoint: Checkpoint | None = None
        trouble: Exception | None = None
        try:
            if rank() == 0:
                with _by_itself():
                    checkpoint = _publish(super().save_checkpoint(*arguments, **options))
        except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
            trouble = error
            self._remove_unfinished()
        self._leave_together(trouble)
        return checkpoint

    def _leave_together(self, trouble: Exception | None) -> None:
        """Stop all ranks when one could not write; the others leave in silence."""
        troubles = gather_over_ranks(trouble is not None)
        if trouble is not None:
            raise SbkitError(
                f"A checkpoint must be written whole, but writing to {self.checkpoints_dir} failed "
                f"({trouble}). The one before it is untouched; make room there and start again."
            ) from trouble
        if any(troubles):
            raise SystemExit(BAD_INPUT)

    def recover_if_possible(
        self,
        importance_key: Callable[[Checkpoint], Any] | None = None,
        max_key: str | None = None,
        min_key: str | None = None,
        ckpt_predicate: Callable[[Checkpoint], bool] | None = None,
    ) -> Checkpoint | None:
        """Load the first in the order asked for that is undamaged, and say which ones are not."""
        best = self.find_whole(
            1,
            importance_key=importance_key,
            max_key=max_key,
            min_key=min_key,
            ckpt_predicate=ckpt_predicate,
        )
        if not best:
            return None
        self.load_checkpoint(best[0])
        return best[0]

    def find_whole(self, count: int, **keys: Any) -> list[Checkpoint]:
        """Find the ``count`` best undamaged checkpoints, and say which better ones are damaged.

        Raises SbkitError when there are checkpoints and all of them are damaged.
        """
        ranked = self.find_checkpoints(**keys)
        whole = list(islice(filter(_is_whole, ranked), count))
        if ranked and not whole:
            raise all_damaged(self.checkpoints_dir, len(ranked))
        return whole

    def load_average(self, count: int, **keys: Any) -> None:
        """Load the modules with the mean weights of the ``count`` best checkpoints."""
        best = self.find_whole(count, **keys)
        for name, recoverable in self.recoverables.items():
            if best and isinstance(recoverable, torch.nn.Module):
                mean = average(best, name)
                refuse_other_model(mean, recoverable.state_dict(), of=str(self.checkpoints_dir))
                recoverable.load_state_dict(mean)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load every recoverable; refuse a checkpoint of another model by naming what differs."""
        self._refuse_other_model(checkpoint)
        super().load_checkpoint(checkpoint)

    def refuse_other_model(self) -> None:
        """Refuse a folder whose newest whole checkpoint is of another model, before it is used."""
        for checkpoint in self.find_whole(1):
            self._refuse_other_model(checkpoint)

    def _refuse_other_model(self, checkpoint: Checkpoint) -> None:
        for name, recoverable in self.recoverables.items():
            if isinstance(recoverable, torch.nn.Module) and name in checkpoint.paramfiles:
                saved = torch.load(checkpoint.paramfiles[name], "cpu", weights_only=True)
                refuse_other_model(saved, recoverable.state_dict(), of=str(checkpoint.path))

    def save_and_keep_only(
        self, *arguments: Any, importance_keys: Sequence[Any] = (), **options: Any
    ) -> None:
        """Save, and delete what is neither best nor recent.

        SpeechBrain's appends to its own default list, so every save takes longer than the last.
        """
        super().save_and_keep_only(*arguments, importance_keys=[*importance_keys], **options)

    def _remove_unfinished(self) -> None:
        if rank() == 0:
            for folder in self.checkpoints_dir.glob(f"{UNFINISHED}*"):
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _construct_checkpoint_objects(folders: Sequence[Path]) -> list[Checkpoint]:
        return [_describe(folder) for folder in folders]

    def _new_checkpoint_dirpath(self) -> Path:
        return _beside(super()._new_checkpoint_dirpath())

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        return _beside(super()._custom_checkpoint_dirpath(name))


@contextmanager
def _by_itself() -> Iterator[None]:
    """Keep SpeechBrain from meeting the other ranks after each file.

    They would wait for a rank that could not write one.
    """
    before = distributed.MAIN_PROC_ONLY
    distributed.MAIN_PROC_ONLY = before + 1
    try:
        yield
    finally:
        distributed.MAIN_PROC_ONLY = before


def average(checkpoints: Sequence[Checkpoint], name: str) -> dict[str, Any]:
    """Average the weights of a module over checkpoints; whole numbers are the first one's.

    One after the other in float64, so memory holds two models however many there are.
    """
    first, *others = (checkpoint.paramfiles[name] for checkpoint in checkpoints)
    mean: dict[str, Any] = torch.load(first, "cpu", weights_only=True)
    types = {key: value.dtype for key, value in mean.items() if value.is_floating_point()}
    for key in types:
        mean[key] = mean[key].double()
    for file in others:
        weights = torch.load(file, "cpu", weights_only=True)
        for key in types:
            mean[key] += weights[key]
    return mean | {key: (mean[key] / len(checkpoints)).to(types[key]) for key in types}


def _describe(folder: Path) -> Checkpoint:
    """Read a checkpoint's meta file; one that cannot be read makes it the oldest of all."""
    described: list[Checkpoint]
    try:
        described = SpeechBrainCheckpointer._construct_checkpoint_objects([folder])
        float(described[0].meta["unixtime"])
    except (OSError, LookupError, TypeError, ValueError, YAMLError):
        return Checkpoint(folder, {"unixtime": 0.0}, {})
    return described[0]


def _is_whole(checkpoint: Checkpoint) -> bool:
    damage = find_damage(checkpoint.path)
    if damage is not None:
        say(f"{checkpoint.path} is left alone: {damage}. Trying the next best.")
    return damage is None


def find_damage(folder: Path) -> str | None:
    """Compare the files with their checksums; None when all is well."""
    try:
        expected: dict[str, str] = json.loads((folder / CHECKSUMS).read_text())
        for name, digest in expected.items():
            if checksum(folder / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    return None


def all_damaged(folder: Path, count: int) -> SbkitError:
    """Make the sentence for a folder without a checkpoint to go on from."""
    return SbkitError(
        f"At least one checkpoint in {folder} must be whole, but all {count} are damaged. Restore "
        "one, or remove the folder to start over."
    )


def checksum(file: Path) -> str:
    """Give a file's SHA-256 in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksum of every file in a folder beside them."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS)
    sums = {file.name: checksum(file) for file in files}
    write_text_atomically(folder / CHECKSUMS, json.dumps(sums, indent=1))


def refuse_other_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, of: str) -> None:
    """Refuse weights of another model; the first differences are named with their sizes."""
    differences = [
        f"{key}: {_size(saved, key)} saved, {_size(wanted, key)} declared"
        for key in sorted({*saved, *wanted})
        if _size(saved, key) != _size(wanted, key)
    ]
    if differences:
        shown = "; ".join(differences[:3])
        raise SbkitError(
            f"The weights in {of} must be those of the declared model, but {len(differences)} "
            f"tensors differ ({shown}). Use the YAML they were trained with, or another folder."
        )


def _size(tensors: Mapping[str, Any], key: str) -> str:
    if key not in tensors:
        return "none"
    return "x".join(map(str, tensors[key].shape)) or "1"


def _beside(folder: Path) -> Path:
    return folder.with_name(UNFINISHED + folder.name)


def _publish(written: Checkpoint) -> Checkpoint:
    """Give a finished folder its name, once everything in it is on the disk."""
    write_checksums(written.path)
    fsync_tree(written.path)
    final = written.path.with_name(written.path.name.removeprefix(UNFINISHED))
    if final.exists():
        shutil.rmtree(final)
    written.path.rename(final)
    files = {name: final / file.name for name, file in written.paramfiles.items()}
    return Checkpoint(final, written.meta, files)
