"""The cache of decoded audio: what a corpus folder holds is decoded once for all its splits.

A clip is known by its path, size and time of change. Its text is not kept: correcting a transcript
decodes nothing. Clips are decoded in blocks, each by the process that holds its lock file, into a
shard. A killed process loses its current block.

A corpus that is still packed: a tar file, unpacked once into the cache, whole or not at all.

List what is in the cache of prepared data, and remove what no corpus needs any more.
"""

import hashlib
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.base.files import building, share_lock, try_lock, write_text_atomically
from sbkit.base.messages import plural, printable
from sbkit.data.filesystem import Storage, writing
from sbkit.data.manifest import decode_paths
from sbkit.data.shard import (
    AUDIO,
    PLACE,
    ShardWriter,
    decoding_progress,
    read_table,
    remove_leftovers,
    share_work,
    to_stored,
)

logger = logging.getLogger(__name__)

CACHE_VERSION = 3  # raise it when the same clip would give other audio, or another key
AUDIO_FOLDER = "audio"  # of the cache
EMBEDDED_FOLDER = "embedded"  # of the cache: files that a dataset or an archive held itself
CORPUS_FILE = "corpus.json"  # in a folder of the cache: whose audio it holds
BLOCK_CLIPS = 1000  # of 5 s at 16 kHz they are 160 MB
BLOCK_BYTES = 200_000_000  # of their files
KEY = "clip"  # the column of a shard's table that says which state of which file a clip was
STATE = r"\t\d+\t\d+$"  # the end of a key: size and time of change
PASSING = ("missing", "unreachable")  # reasons that may be gone tomorrow


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if own := os.environ.get("SBKIT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"


NO_AUDIO = pa.schema(
    {KEY: pa.string(), "samples": pa.int64(), "digest": pa.string(), AUDIO: PLACE}
).empty_table()


class StoredAudio(NamedTuple):
    """The audio of clips: columns samples, digest and audio, and by row what has none.

    The table is without the rows that have an error.
    """

    table: pa.Table
    errors: dict[int, AudioError]


def prepare_audio(
    paths: pa.ChunkedArray, *, sample_rate: int, cache_folder: Path, store: str, title: str
) -> StoredAudio:
    """Return where the audio of clips is, after decoding those that are not in the cache yet.

    All clips have one folder in the cache, by the corpus folder that they have in common.

    Raises:
        SbkitError: the cache cannot be written, or its disk is full.
    """
    if not len(paths):
        return StoredAudio(NO_AUDIO, {})
    parents = {path[: path.rfind("/") + 1] for path in decode_paths(paths)}  # "/" for the root
    corpus = Path(os.path.commonpath([Path(os.path.abspath(each)) for each in parents]))  # noqa: PTH100
    identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}\n{store}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
    name = f"{corpus.parent.name}-{corpus.name}-{key}".lstrip("-.")
    cache = _Cache(cache_folder.expanduser() / AUDIO_FOLDER / name, sample_rate, store)
    files = _Files(paths)
    cache.look()
    if missing := files.rows.keys() - cache.known:
        with _write_access(cache.folder), decoding_progress(title, len(missing)) as count:
            describe_folder(cache.folder, corpus)
            works = [
                (block[0] + block[-1], partial(cache.decode, files, block, count))
                for block in files.blocks()
                if not missing.isdisjoint(block)
            ]
            share_work(cache.folder, works)
            cache.look()
    return cache.locate(files)


@contextmanager
def _write_access(folder: Path) -> Iterator[None]:
    """Make a folder and hold a shared lock on it; clean up first if no process has it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            if try_lock(lock, without_locks=False):
                remove_leftovers(folder)
                for audio in folder.glob("*.arrow"):
                    if not audio.with_suffix(".parquet").is_file():
                        audio.unlink()
            share_lock(lock)
            yield
        finally:
            os.close(lock)


class _Files:
    """The files of clips as they are now.

    errors: by row, of those that cannot be reached; known: what each of the others is known by, its
    path, size and time of change, with its row; rows: the last row of each key.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column
        self.errors, self.known = dict[int, AudioError](), list[tuple[str, int]]()
        self._sizes = list[int]()
        for row, path in enumerate(decode_paths(column)):
            try:
                status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
                path.encode()  # it becomes a text of a table
            except (OSError, ValueError) as error:
                reason = "missing" if isinstance(error, FileNotFoundError) else "unreachable"
                what = getattr(error, "strerror", None) or "its name is not UTF-8"
                sentence = f"{path} must be an audio file, but it is {reason} ({what}). Repair it."
                self.errors[row] = AudioError(reason, sentence)
                continue
            self.known.append((f"{path}\t{status.st_size}\t{status.st_mtime_ns}", row))
            self._sizes.append(status.st_size)
        self.rows = dict(self.known)

    def path(self, key: str) -> Path:
        """Return the path of a file."""
        return Path(os.fsdecode(self.column[self.rows[key]].as_py()))

    def blocks(self) -> list[list[str]]:
        """Divide all files, in the same way in every process, into parts for a shard each."""
        marks = np.cumsum(self._sizes) // BLOCK_BYTES + np.arange(len(self._sizes)) // BLOCK_CLIPS
        ends = [*(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
        parts = (self.known[a:b] for a, b in zip([0, *ends], ends, strict=False))
        return [[*dict.fromkeys(key for key, _ in part)] for part in parts]


class _Cache:
    """The shards of one corpus folder, at one sample rate (Hz) and in one store.

    unreadable: by its key, why a file holds no usable audio; known: all keys, these included.
    """

    def __init__(self, folder: Path, sample_rate: int, store: str) -> None:
        self.folder, self._sample_rate, self._store = folder, sample_rate, store
        self._tables: dict[Path, pa.Table] = {}
        self.unreadable: dict[str, AudioError] = {}
        self.known = set[str]()

    def look(self) -> None:
        """Read the tables that are new."""
        for file in sorted({*self.folder.glob("*.parquet")} - self._tables.keys()):
            audio = file.with_suffix(".arrow")
            try:
                table, facts = read_table(file.read_bytes())
                if facts.bytes and audio.stat().st_size != facts.bytes:
                    raise ValueError(f"{audio.name} has not the {facts.bytes} bytes written to it")
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning(f"{audio} is damaged ({error}); its clips are decoded again.")
                with suppress(OSError):
                    file.unlink()
                continue
            self._tables[file] = table
            self.known.update(table[KEY].to_pylist())
            self._add_unreadable({key: AudioError(*why) for key, *why in facts.left_out})

    def _add_unreadable(self, found: Mapping[str, AudioError]) -> None:
        self.unreadable |= found
        self.known.update(found)

    def decode(self, files: _Files, block: Sequence[str], count: Callable[[], None]) -> None:
        """Decode a block, less what others have done, into a shard."""
        self.look()
        keys = [key for key in block if key not in self.known]
        if not keys:
            return
        paths = [files.path(key) for key in keys]
        names = (path.name for path in paths)
        with closing(ShardWriter(self.folder)) as writer:
            kept, errors = writer.decode(
                names, paths, self._sample_rate, store=self._store, count=count
            )
            self._add_unreadable({keys[place]: error for place, error in errors.items()})
            bad = [
                (keys[place], error.reason, str(error))
                for place, error in errors.items()
                if error.reason not in PASSING
            ]
            columns = {KEY: pa.array([keys[place] for place in kept], pa.string())}
            writer.publish(Storage(str(self.folder)), uuid4().hex, columns, left_out=bad)

    def locate(self, files: _Files) -> StoredAudio:
        """Return where the audio of files is."""
        errors, keys = dict(files.errors), list[str]()
        for key, row in files.known:
            if key in self.unreadable:
                errors[row] = self.unreadable[key]
            else:
                keys.append(key)
        parts = [NO_AUDIO]
        for file, table in self._tables.items():
            audio = pa.repeat(str(file.with_suffix(".arrow")), len(table))
            if self._store == "none":
                audio = pc.replace_substring_regex(table[KEY].combine_chunks(), STATE, "")
            stored = to_stored(table, audio, shard=0, sample_rate=self._sample_rate)
            parts.append(stored.add_column(0, KEY, table[KEY]))
        stored = pa.concat_tables(parts)
        rows = pc.index_in(pa.array(keys, pa.string()), value_set=stored[KEY])
        return StoredAudio(stored.take(rows).drop_columns([KEY]), errors)


def describe_folder(folder: Path, corpus: Path) -> None:
    """Note whose audio a folder of the cache holds, unless that is noted."""
    if not (folder / CORPUS_FILE).is_file():
        write_text_atomically(folder / CORPUS_FILE, json.dumps({"folder": str(corpus)}) + "\n")


SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PIECE = 1 << 20  # bytes


def is_archive(path: Path) -> bool:
    """Return whether a path is a tar file, by its name."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def unpacked(corpus: Path) -> Path:
    """Return the folder of a corpus; an archive is unpacked into the cache, unless it is there.

    Only files and folders are unpacked, no links and no devices. What is unpacked belongs to the
    archive as it is now: its path, size and time.

    Raises:
        SbkitError: the archive is damaged or leads out of its folder, or there is no room for it.
    """
    if not is_archive(corpus):
        return corpus
    archive, facts = corpus.resolve(), corpus.stat()
    known_by = f"{archive}\n{facts.st_size}\n{facts.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(known_by)).hexdigest()[:12]
    folder = default_cache() / EMBEDDED_FOLDER / f"{archive.name}-{key}"
    if not folder.is_dir():
        logger.info(f"unpacking {archive} into {folder}, once")
        with writing(folder.parent), building(folder) as beside:
            _extract(archive, beside)
            describe_folder(beside, archive)
    return _innermost(folder)


def _extract(archive: Path, folder: Path) -> None:
    """Write what an archive holds into a folder; read it to its end, where its checksum stands."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined] # 0.9 GB for two million clips
                path = PurePosixPath(member.name)  # Python before 3.11.4 has no filter for it
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"it names {member.name[:200]!r}, out of its folder")
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with content, (folder / path).open("wb") as target:
                        shutil.copyfileobj(content, target, PIECE)
            while tar.fileobj is not None and tar.fileobj.read(PIECE):
                pass
    except Exception as error:  # the libraries that unpack have errors of many kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SbkitError(
            f"{archive} must be a whole tar file, but cannot be unpacked ({str(error)[:200]}). "
            "Download it again."
        ) from error


def _innermost(folder: Path) -> Path:
    """Go down as long as a folder holds one folder and nothing else."""
    inside = [each for each in folder.iterdir() if each.name != CORPUS_FILE]
    is_alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name != "clips"
    return _innermost(inside[0]) if is_alone else folder


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
