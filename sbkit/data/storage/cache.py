"""List what lies in the cache of prepared data, and remove what is no longer needed."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

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

    corpus: the folder or file whose audio it holds, None where that is not known; sample_rate: in
    Hz; clips, seconds: of decoded audio; bytes: on the disk; last_used: seconds since 1970.
    """

    folder: Path
    corpus: Path | None
    sample_rate: int | None
    clips: int
    seconds: float
    bytes: int
    last_used: float

    @property
    def is_orphan(self) -> bool:
        """Return whether the corpus is gone; one that cannot be seen may be there."""
        try:
            return self.corpus is not None and not self.corpus.exists()
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[Entry]:
    """List what is in the cache, the least recently used first."""
    entries = [
        _read_entry(folder)
        for name in (AUDIO_FOLDER, EMBEDDED_FOLDER)
        for folder in sorted((cache_folder / name).glob("*"))
        if folder.is_dir() and not folder.is_symlink()  # a link may lead out of the cache
    ]
    return sorted(entries, key=lambda entry: entry.last_used)


def _read_entry(folder: Path) -> Entry:
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        facts = json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))
    lengths = [length for table in folder.glob("*.parquet") for length in _lengths(table)]
    rate = facts.get("sample_rate")
    return Entry(
        folder=folder,
        corpus=Path(facts["folder"]) if facts else None,
        sample_rate=rate,
        clips=len(lengths),
        seconds=sum(lengths) / (rate or SAMPLE_RATE),
        bytes=_size(folder),
        last_used=(folder / CORPUS_FILE if facts else folder).stat().st_mtime,
    )


def _lengths(table: Path) -> list[int]:
    """Return the samples of each clip of a shard; none where its table is damaged."""
    with suppress(OSError, ValueError, LookupError):
        lengths: list[int] = pq.read_table(table, columns=["samples"])[0].to_pylist()
        return lengths
    return []


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # another process may have removed it
            size += file.lstat().st_size
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
    if not entries:
        print(f"{cache_folder} holds no prepared audio.")
        return
    print(f"{'last used':10}  {'size':>9}  {'clips':>8}  {'hours':>7}  {'rate':>5}  corpus folder")
    for entry in entries:
        day = datetime.fromtimestamp(entry.last_used).date().isoformat()
        what = f"unknown ({entry.folder})" if entry.corpus is None else str(entry.corpus)
        what += " (gone)" if entry.is_orphan else ""
        clips, hours = entry.clips or "", f"{entry.seconds / 3600:.2f}" if entry.clips else ""
        size, rate = _megabytes(entry.bytes), entry.sample_rate or ""
        print(printable(f"{day:10}  {size:>9}  {clips:>8}  {hours:>7}  {rate:>5}  {what}"))
    total = sum(entry.bytes for entry in entries)
    print(f"{_megabytes(total)} in {plural(len(entries), 'folder')} of {cache_folder}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def prune(
    cache_folder: Path, *, older_than: float | None, unused: bool, dry_run: bool = False
) -> None:
    """Remove what is not needed, and print each folder; with ``dry_run`` only print."""
    unused = unused or older_than is None
    chosen = find_prunable(list_entries(cache_folder), older_than=older_than, unused=unused)
    removed, freed = 0, 0
    for entry, reason in chosen:
        if not dry_run and not remove(entry):
            print(printable(f"kept {entry.folder}: a process is preparing it"))
            continue
        word = "would remove" if dry_run else "removed"
        print(printable(f"{word} {entry.folder} ({_megabytes(entry.bytes)}): {reason}"))
        removed, freed = removed + 1, freed + entry.bytes
    word = "would be freed" if dry_run else "freed"
    print(f"{_megabytes(freed)} {word}, {plural(removed, 'folder')}")
