"""The folder of checkpoints: one run's, listed also where some are damaged, and written whole.

A checkpoint is written under another name, and renamed once it is whole on the disk.
"""

import math
import os
import shutil
from pathlib import Path

from speechbrain.utils.checkpoints import CKPT_PREFIX, Checkpoint, Checkpointer
from yaml import YAMLError

from sbkit.base.checksums import UNREADABLE, write_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    fsync_tree,
    require_writable,
    try_lock,
)

UNFINISHED = ".unfinished-"  # prefix of a folder that is still being written

_held: dict[tuple[int, int], int] = {}  # open folders by device and inode, until this process ends


def hold(folder: Path) -> None:
    """Create a folder and lock it for this process; disks without locks lock nothing.

    A run calls this with its run folder before anything in it is written, and the Checkpointer with
    that of its checkpoints. The kernel takes the lock back when the process ends.
    Raises SbkitError when another process has it, or when it can be no folder.
    """
    require_writable(folder, option="output_folder")
    state = folder.stat()
    place = (state.st_dev, state.st_ino)
    if place in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise SbkitError(
            f"One run at a time may save to {folder}, but another one is training there. Wait for "
            "it, stop it, or choose another output_folder."
        )
    if not _held:
        os.register_at_fork(after_in_child=_forget)
    _held[place] = descriptor


def _forget() -> None:
    """Close them in a worker process, which would hold them longer than a run that is killed."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


def describe(folder: Path) -> Checkpoint | None:
    """Read a checkpoint's meta file; None when that, or its date, cannot be read."""
    try:
        (described,) = Checkpointer._construct_checkpoint_objects([folder])
        return described if math.isfinite(described.meta["unixtime"]) else None
    except (*UNREADABLE, YAMLError):
        return None


def checkpoint_folders(folder: Path) -> list[Path]:
    """List the folders of checkpoints, damaged ones included."""
    return sorted(each for each in folder.glob(f"{CKPT_PREFIX}+*") if each.is_dir())


def newest_described(folder: Path) -> Checkpoint | None:
    """Find the newest checkpoint by its meta file alone, whether it is whole or damaged."""
    described = filter(None, map(describe, checkpoint_folders(folder)))
    return max(described, key=lambda each: each.meta["unixtime"], default=None)


def staging_path(folder: Path) -> Path:
    """Name the folder that is written in the place of one."""
    return folder.with_name(UNFINISHED + folder.name)


def publish(written: Checkpoint) -> Checkpoint:
    """Rename a finished folder to its name, once everything in it is on the disk."""
    write_checksums(written.path)
    fsync_tree(written.path)
    final = written.path.with_name(written.path.name.removeprefix(UNFINISHED))
    if final.exists():
        shutil.rmtree(final)
    written.path.rename(final)
    files = {name: final / file.name for name, file in written.paramfiles.items()}
    return Checkpoint(final, written.meta, files)


def remove_unfinished(folder: Path) -> None:
    """Clear away what a killed or failed save left in a folder of checkpoints."""
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
