"""One training run to a folder: a lock that the kernel takes back when the process ends."""

import os
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable, try_lock

_held: dict[tuple[int, int], int] = {}  # open folders by device and inode, until this process ends


def hold(folder: Path) -> None:
    """Create a folder and lock it for this process; disks without locks lock nothing.

    A run calls this with its run folder before anything in it is written, and the Checkpointer with
    that of its checkpoints.
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
