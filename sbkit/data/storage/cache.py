"""List what is in the cache of prepared data, and remove what no corpus needs any more."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import try_lock
from sbkit.base.text import plural, printable
from sbkit.data.storage.audio_cache import AUDIO_FOLDER, CORPUS_FILE, EMBEDDED_FOLDER


@dataclass(frozen=True)
class Entry:
    """One folder of the cache.

    corpus: the folder or file whose audio it holds, None where that is not known; bytes: on the
    disk.
    """

    folder: Path
    corpus: Path | None
    bytes: int

    @property
    def is_orphan(self) -> bool:
        """Return whether the corpus is gone; one that cannot be seen may be there."""
        try:
            return self.corpus is not None and not self.corpus.exists()
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[Entry]:
    """List what is in the cache."""
    entries = []
    for name in (AUDIO_FOLDER, EMBEDDED_FOLDER):
        for folder in sorted((cache_folder / name).glob("*")):
            if folder.is_dir() and not folder.is_symlink():  # a link may lead out of the cache
                file = folder / CORPUS_FILE
                corpus = Path(json.loads(file.read_text())["folder"]) if file.is_file() else None
                size = sum(each.lstat().st_size for each in folder.rglob("*"))
                entries.append(Entry(folder, corpus, size))
    return entries


def remove(entry: Entry) -> bool:
    """Remove a folder of the cache; return False where a process is preparing it.

    Raises:
        SbkitError: it cannot be removed.
    """
    lock = os.open(entry.folder, os.O_RDONLY)
    try:
        if not try_lock(lock):
            return False
        for table in entry.folder.glob("*.parquet"):  # first: a shard without its table is none
            table.unlink()
        shutil.rmtree(entry.folder)
    except OSError as error:
        raise SbkitError(f"{entry.folder} cannot be removed: {error.strerror}.") from error
    finally:
        os.close(lock)
    return True


def print_entries(cache_folder: Path) -> None:
    """Print what is in the cache as a table."""
    entries = list_entries(cache_folder)
    for entry in entries:
        what = "unknown" if entry.corpus is None else str(entry.corpus)
        what += " (gone)" if entry.is_orphan else ""
        print(printable(f"{_megabytes(entry.bytes):>9}  {what}, in {entry.folder}"))
    total = sum(entry.bytes for entry in entries)
    print(f"{_megabytes(total)} in {plural(len(entries), 'folder')} of {cache_folder}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def prune(cache_folder: Path) -> None:
    """Remove what no corpus needs, since its folder is gone, and print each folder."""
    for entry in list_entries(cache_folder):
        if entry.is_orphan:
            done = "removed" if remove(entry) else "kept, since a process is preparing it:"
            print(printable(f"{done} {entry.folder} ({_megabytes(entry.bytes)}) of {entry.corpus}"))
