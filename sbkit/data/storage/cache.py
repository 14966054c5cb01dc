"""What lies in the cache of prepared data, and what of it can be removed."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.base.files import try_lock
from sbkit.base.text import plural, printable
from sbkit.base.units import SAMPLE_RATE
from sbkit.data.storage.audio_cache import AUDIO_FOLDER, CORPUS_FILE, EMBEDDED_FOLDER

DAY = 86_400  # seconds


@dataclass(frozen=True)
class Entry:
    """One folder of the cache.

    Attributes:
        folder: in the cache.
        corpus: the folder whose audio it holds, or None where that is not known.
        sample_rate: in Hz, or None where that is not known.
        clips, seconds: of readable audio; None where they are not known.
        bytes: on the disk.
        last_used: seconds since 1970.
    """

    folder: Path
    corpus: Path | None
    sample_rate: int | None
    clips: int | None
    seconds: float | None
    bytes: int
    last_used: float

    @property
    def is_orphan(self) -> bool:
        """Return whether the corpus folder is gone; one that may not be seen is not known to be."""
        try:
            return self.corpus is not None and not self.corpus.exists()
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[Entry]:
    """List what is in the cache, the least recently used first."""
    entries = [*_audio_entries(cache_folder), *_embedded_entries(cache_folder)]
    return sorted(entries, key=lambda entry: entry.last_used)


def _audio_entries(cache_folder: Path) -> Iterator[Entry]:
    for folder in _folders(cache_folder / AUDIO_FOLDER):
        facts = _read_facts(folder)
        lengths = [_lengths(table) for table in folder.glob("*.parquet")]
        rate = facts.get("sample_rate")
        yield Entry(
            folder=folder,
            corpus=Path(facts["folder"]) if facts else None,
            sample_rate=rate,
            clips=sum(map(len, lengths)),
            seconds=sum(int(each.sum()) for each in lengths) / (rate or SAMPLE_RATE),
            bytes=_size(folder),
            last_used=_last_used(folder, known=bool(facts)),
        )


def _embedded_entries(cache_folder: Path) -> Iterator[Entry]:
    for folder in _folders(cache_folder / EMBEDDED_FOLDER):
        facts = _read_facts(folder)
        corpus = Path(facts["folder"]) if facts else None
        used = _last_used(folder, known=bool(facts))
        yield Entry(folder, corpus, None, None, None, _size(folder), used)


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return what is noted of a folder; nothing where sbkit did not write it."""
    try:
        facts = json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))
        return {**facts, "folder": str(facts["folder"])}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _lengths(table: Path) -> npt.NDArray[np.int64]:
    """Return the samples of each clip of a shard; none where its table is damaged."""
    try:
        lengths: npt.NDArray[np.int64] = pq.read_table(table, columns=["samples"])[0].to_numpy()
    except (OSError, ValueError, LookupError):
        return np.empty(0, np.int64)
    return lengths


def _last_used(folder: Path, *, known: bool) -> float:
    """Return when a folder was used, which is noted in the file of a known corpus."""
    return (folder / CORPUS_FILE if known else folder).stat().st_mtime


def _folders(parent: Path) -> Iterator[Path]:
    """Yield the folders in a folder; a link may lead out of the cache, and is none."""
    if parent.is_dir() and not parent.is_symlink():
        with os.scandir(parent) as entries:
            names = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        yield from (parent / name for name in sorted(names))


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # one that a process has just removed
            if not file.is_symlink() and file.is_file():
                size += file.stat().st_size
    return size


def find_prunable(
    entries: Sequence[Entry], *, older_than: float | None, unused: bool
) -> list[tuple[Entry, str]]:
    """Choose what to remove, with the reason.

    Args:
        entries: what is in the cache.
        older_than: days; what was not used for so long is chosen.
        unused: whether to choose what no corpus needs, since its folder is gone.
    """
    chosen = []
    for entry in entries:
        days = (time.time() - entry.last_used) / DAY
        if unused and entry.is_orphan:
            chosen.append((entry, f"{entry.corpus} is gone"))
        elif older_than is not None and days > older_than:
            chosen.append((entry, f"not used for {days:.0f} days"))
    return chosen


def remove(entry: Entry, cache_folder: Path) -> bool:
    """Remove a folder of the cache; return False where a process is preparing it.

    Raises:
        SbkitError: the folder is not in the cache, or cannot be removed.
    """
    folder = entry.folder
    inside = [cache_folder / name for name in (AUDIO_FOLDER, EMBEDDED_FOLDER)]
    if folder.parent not in inside or folder.is_symlink():
        raise SbkitError(
            f"Only folders of {cache_folder} may be removed, but {folder} is not one. Remove it "
            "yourself."
        )
    lock = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(lock):
            return False
        for table in folder.glob("*.parquet"):  # first, so that no half is taken for a whole
            table.unlink()
        shutil.rmtree(folder)
    except OSError as error:
        raise SbkitError(
            f"{folder} must be removable, but is not: {error.strerror}. Remove it by hand."
        ) from error
    finally:
        os.close(lock)
    return True


def print_entries(cache_folder: Path) -> None:
    """Print what is in the cache as a table."""
    entries = list_entries(cache_folder)
    if not entries:
        print(f"{cache_folder} holds no prepared audio.")
        return
    print(f"{'last used':10}  {'size':>9}  {'clips':>8}  {'hours':>7}  {'rate':>5}  corpus folder")
    for entry in entries:
        print(_row(entry))
    total = sum(entry.bytes for entry in entries)
    print(f"{_megabytes(total)} in {plural(len(entries), 'folder')} of {cache_folder}")


def _row(entry: Entry) -> str:
    day = datetime.fromtimestamp(entry.last_used).date().isoformat()
    clips = "" if entry.clips is None else str(entry.clips)
    hours = "" if entry.seconds is None else f"{entry.seconds / 3600:.2f}"
    what = f"unknown ({entry.folder})" if entry.corpus is None else str(entry.corpus)
    note = " (gone)" if entry.is_orphan else ""
    rate = entry.sample_rate or ""
    size = _megabytes(entry.bytes)
    return printable(f"{day:10}  {size:>9}  {clips:>8}  {hours:>7}  {rate:>5}  {what}{note}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def prune(
    cache_folder: Path, *, older_than: float | None, unused: bool, dry_run: bool = False
) -> None:
    """Remove what is not needed, and print each folder; with ``dry_run`` only print."""
    if older_than is None and not unused:
        unused = True
    removed, freed = 0, 0
    for entry, reason in find_prunable(
        list_entries(cache_folder), older_than=older_than, unused=unused
    ):
        if not dry_run and not remove(entry, cache_folder):
            print(printable(f"kept {entry.folder}: a process is preparing it"))
            continue
        word = "would remove" if dry_run else "removed"
        print(printable(f"{word} {entry.folder} ({_megabytes(entry.bytes)}): {reason}"))
        removed, freed = removed + 1, freed + entry.bytes
    word = "would be freed" if dry_run else "freed"
    print(f"{_megabytes(freed)} {word}, {plural(removed, 'folder')}")
