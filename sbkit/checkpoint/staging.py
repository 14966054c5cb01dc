"""Write a folder under another name, and rename it once it is whole on the disk."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechbrain.utils import distributed
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.files import fsync_tree
from sbkit.checkpoint.integrity import write_checksums

UNFINISHED = ".unfinished-"  # prefix of a folder that is still being written


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


@contextmanager
def main_process_only() -> Iterator[None]:
    """Keep SpeechBrain from waiting for the other ranks after each file.

    They would wait for a rank that could not write one.
    """
    before = distributed.MAIN_PROC_ONLY
    distributed.MAIN_PROC_ONLY = before + 1
    try:
        yield
    finally:
        distributed.MAIN_PROC_ONLY = before
