"""The folder of a run's checkpoints: one run locks it, and each checkpoint is written whole."""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sbkit.base.checksums import READ_ERRORS, write_checksums
from sbkit.base.errors import ConfigError
from sbkit.base.files import fsync_path, fsync_tree, open_lock, require_writable, try_lock
from sbkit.config.document import PlainLoader, read_yaml_text

logger = logging.getLogger(__name__)

# Names in SpeechBrain's checkpoints, which can be read, and which it can read
PREFIX, META_FILE, SUFFIX = "CKPT+", "CKPT.yaml", ".ckpt"
END_OF_EPOCH = "end-of-epoch"  # in the meta file
UNFINISHED = ".unfinished-"  # prefix of a folder that is still being written
REPLACED_SUFFIX = "+replaced"  # suffix of a checkpoint while another one takes its name
TASK, FORMAT = "task", "format"  # in the meta file
CHECKPOINT_FORMAT = 2  # 1 had none: the level of its features was moved by single clicks


class Checkpoint(NamedTuple):
    """A saved position of a run; the fields are those of SpeechBrain's Checkpoint."""

    path: Path  # its folder
    meta: Mapping[str, Any]
    paramfiles: Mapping[str, Path]  # by recoverable


_locked: dict[Path, int] = {}  # the descriptors of the folders that this process has locked


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder, and lock it inside a `with` statement, or until the process ends.

    On a file system without locks, as on some clusters, the folder is not locked.
    """
    require_writable(folder, option="output_folder")
    resolved = folder.resolve()
    if resolved in _locked:
        raise ConfigError(
            f"Only one run at a time may save to {folder}, but this process is training there."
        )
    _require_renaming(folder)
    descriptor = _locked[resolved] = open_lock(folder)
    try:
        if not try_lock(descriptor):
            raise ConfigError(
                f"Only one run at a time may save to {folder}, but another one is training there."
            )
        if not try_lock(descriptor, if_unsupported=False):
            logger.info(
                f"note: the file system of {folder} has no locks. Start only one run there."
            )
        yield
    finally:
        if _locked.pop(resolved, None) is not None:  # a forked worker has closed it
            os.close(descriptor)


def _require_renaming(folder: Path) -> None:
    """Refuse a file system that cannot rename folders, such as some mounts of object stores."""
    probe = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
    renamed = probe.with_name(f"{probe.name}{REPLACED_SUFFIX}")
    try:
        (probe / "file").touch()
        probe.rename(renamed)
    except OSError as error:
        raise ConfigError(
            "`output_folder` must be on a file system that can rename folders, but renaming one in "
            f"{folder} failed ({error.strerror})."
        ) from error
    finally:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)


def _close_inherited_locks() -> None:
    """Close the descriptors in a forked worker, which may outlive a killed run."""
    for descriptor in _locked.values():
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read a checkpoint's meta file; None if the file or its date cannot be read.

    Raises ConfigError for a checkpoint of another format.
    """
    try:
        meta = yaml.load(read_yaml_text(folder / META_FILE), PlainLoader)
        parameter_files = {file.stem: file for file in folder.glob(f"*{SUFFIX}")}
        is_dated = math.isfinite(meta["unixtime"])
    except (*READ_ERRORS, yaml.YAMLError):
        return None
    # Checkpoints of SpeechBrain have no task.
    if TASK in meta and (format := meta.get(FORMAT, 1)) != CHECKPOINT_FORMAT:
        raise ConfigError(
            f"{folder} has format {format}, and this version of sbkit reads {CHECKPOINT_FORMAT}: "
            "the level of features is measured in another way. Train the run again, in another "
            "`output_folder`."
        )
    return Checkpoint(folder, meta, parameter_files) if is_dated else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """List the folders of checkpoints, including damaged ones."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Find the newest checkpoint by the dates in the meta files; other files may be damaged."""
    checkpoints = filter(None, map(read_checkpoint, checkpoint_folders(folder)))
    return max(checkpoints, key=lambda checkpoint: checkpoint.meta["unixtime"], default=None)


def staging_path(folder: Path) -> Path:
    """Return the path under which a folder is written before it gets its name."""
    return folder.with_name(UNFINISHED + folder.name)


def publish(staged: Path, folder: Path, meta: Mapping[str, Any]) -> Checkpoint:
    """Rename a finished folder to its name, once everything in it is on the disk.

    If the name is taken, that checkpoint is moved aside and removed afterwards, so a kill at any
    moment leaves a whole checkpoint.
    """
    write_checksums(staged)
    fsync_tree(staged)
    replaced = folder.with_name(folder.name + REPLACED_SUFFIX)
    if folder.exists():
        folder.rename(replaced)
    staged.rename(folder)
    fsync_path(folder.parent)
    if replaced.exists():
        # A process that is killed while it removes the folder leaves no damaged checkpoint.
        replaced.rename(staged)
        shutil.rmtree(staged)
    return Checkpoint(folder, meta, {file.stem: file for file in folder.glob(f"*{SUFFIX}")})


def remove_unfinished(folder: Path) -> None:
    """Remove the remains of a killed or failed save, and undo a replacement that it began."""
    for replaced in folder.glob(f"{PREFIX}*{REPLACED_SUFFIX}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED_SUFFIX))
        replaced.rename(staging_path(final) if final.exists() else final)
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
