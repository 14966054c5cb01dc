"""The cache of decoded audio: each clip of a corpus folder is decoded once, for all its splits.

A clip is identified by its path, size and time of change. Its text is not kept, so correcting a
transcript decodes nothing. Clips are decoded in blocks: the process that holds a block's lock file
decodes it into a shard. A killed process loses its current block.

The cache also keeps unpacked archives, and audio files that were inside datasets.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.io import AudioError
from sbkit.base.errors import DataError
from sbkit.base.files import building, share_lock, try_lock, write_text_atomically
from sbkit.base.messages import plural, printable
from sbkit.data.filesystem import Storage, writing
from sbkit.data.manifest import decode_paths
from sbkit.data.shard import (
    AUDIO,
    AUDIO_TYPE,
    ShardWriter,
    read_shard_table,
    remove_leftovers,
    share_work,
    to_stored,
)
from sbkit.logs.progress import progress_bar

logger = logging.getLogger(__name__)

CACHE_VERSION = 3  # raise it if the same clip would give other audio, or another key
AUDIO_FOLDER = "audio"  # of the cache
EXTRACTED_FOLDER = "embedded"  # of the cache: files that were in a dataset or an archive
CORPUS_FILE = "corpus.json"  # in a folder of the cache: the path of its corpus
BLOCK_CLIPS = 1000  # 160 MB if they last 5 s at 16 kHz
BLOCK_BYTES = 200_000_000  # of the files of a block's clips
KEY_COLUMN = "clip"  # of a shard's table; a key is the path, size and time of change of a file
KEY_STATE = r"\t\d+\t\d+$"  # size and time of change, in a key
TEMPORARY_REASONS = ("missing", "unreachable")  # not recorded: tomorrow the file may be there
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
COPY_BYTES = 1 << 20


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if folder := os.environ.get("SBKIT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"


# Decoded audio

NO_AUDIO = pa.schema(
    {KEY_COLUMN: pa.string(), "samples": pa.int64(), "digest": pa.string(), AUDIO: AUDIO_TYPE}
).empty_table()


class StoredAudio(NamedTuple):
    """Where the audio of clips is."""

    table: pa.Table  # the columns samples, digest and audio of the readable clips
    errors: dict[int, AudioError]  # of the unreadable clips, by row


def cache_audio(
    paths: pa.ChunkedArray, *, sample_rate: int, cache_folder: Path, store: str, title: str
) -> StoredAudio:
    """Locate the audio of clips, after decoding those that are not in the cache yet.

    ``paths`` are bytes, ``sample_rate`` is in Hz, ``store`` is one of `STORES`, and ``title`` is
    shown while clips are decoded. All clips share one folder of the cache, named after the folder
    that contains them all.
    """
    if not len(paths):
        return StoredAudio(NO_AUDIO, {})
    parents = {path[: path.rfind("/") + 1] for path in decode_paths(paths)}  # "/" for the root
    corpus = Path(os.path.commonpath([Path(os.path.abspath(path)) for path in parents]))  # noqa: PTH100
    identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}\n{store}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
    name = f"{corpus.parent.name}-{corpus.name}-{key}".lstrip("-.")
    shards = _CorpusShards(cache_folder.expanduser() / AUDIO_FOLDER / name, sample_rate, store)
    keys, errors = _file_keys(paths)
    shards.read_new()
    if missing := {*keys.values()} - shards.keys:
        with _write_access(shards.folder), progress_bar(title, len(missing)) as advance:
            describe_folder(shards.folder, corpus)
            tasks = [
                (block[0] + block[-1], partial(shards.decode, block, partial(advance, 1)))
                for block in _divide([*keys.values()])
                if not missing.isdisjoint(block)
            ]
            share_work(shards.folder, tasks)
            shards.read_new()
    return shards.locate(keys, errors)


@contextmanager
def _write_access(folder: Path) -> Iterator[None]:
    """Hold a shared lock on a new or existing folder; if no other process does, clean it up."""
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


def _file_keys(paths: pa.ChunkedArray) -> tuple[dict[int, str], dict[int, AudioError]]:
    """Return the path, size and time of change of every file, or why it is unreachable, by row."""
    keys: dict[int, str] = {}
    errors: dict[int, AudioError] = {}
    for row, path in enumerate(decode_paths(paths)):
        try:
            status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
            path.encode()  # it becomes text in a table
        except (OSError, ValueError) as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else "unreachable"
            detail = getattr(error, "strerror", None) or "its name is not UTF-8"
            errors[row] = AudioError(reason, f"{path} is {reason} ({detail}). Repair it.")
            continue
        keys[row] = f"{path}\t{status.st_size}\t{status.st_mtime_ns}"
    return keys, errors


def _divide(keys: Sequence[str]) -> list[list[str]]:
    """Divide keys into blocks, one for each shard, in the same way in every process."""
    sizes = [int(key.rsplit("\t", 2)[1]) for key in keys]
    block_of = np.cumsum(sizes) // BLOCK_BYTES + np.arange(len(keys)) // BLOCK_CLIPS
    ends = [*(np.flatnonzero(np.diff(block_of)) + 1).tolist(), len(keys)]
    return [[*dict.fromkeys(keys[start:end])] for start, end in pairwise([0, *ends])]


class _CorpusShards:
    """The shards of one corpus folder, at one sample rate (Hz) and in one store."""

    def __init__(self, folder: Path, sample_rate: int, store: str) -> None:
        self.folder, self._sample_rate, self._store = folder, sample_rate, store
        self._tables: dict[Path, pa.Table] = {}
        self._unreadable: dict[str, AudioError] = {}  # by the key of the file
        self.keys: set[str] = set()  # of all files that were decoded or are unreadable

    def read_new(self) -> None:
        """Read the tables that were added."""
        for file in sorted({*self.folder.glob("*.parquet")} - self._tables.keys()):
            audio = file.with_suffix(".arrow")
            try:
                table, facts = read_shard_table(file.read_bytes())
                if facts.bytes and audio.stat().st_size != facts.bytes:
                    raise ValueError(f"{audio.name} should have {facts.bytes} bytes")
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning(f"{audio} is damaged ({error}); its clips are decoded again.")
                with suppress(OSError):
                    file.unlink()
                continue
            self._tables[file] = table
            self._unreadable |= {key: AudioError(*reason) for key, *reason in facts.left_out}
            self.keys.update(table[KEY_COLUMN].to_pylist(), self._unreadable)

    def decode(self, block: Sequence[str], on_clip: Callable[[], None]) -> None:
        """Decode a block into a shard, except for clips that other processes have decoded."""
        self.read_new()
        keys = [key for key in block if key not in self.keys]
        if not keys:
            return
        paths = [Path(re.sub(KEY_STATE, "", key)) for key in keys]
        names = (path.name for path in paths)
        with closing(ShardWriter(self.folder)) as writer:
            added, errors = writer.add_clips(
                names, paths, self._sample_rate, store=self._store, on_clip=on_clip
            )
            self._unreadable |= {keys[index]: error for index, error in errors.items()}
            self.keys.update(self._unreadable)
            left_out = [
                (keys[index], error.reason, str(error))
                for index, error in errors.items()
                if error.reason not in TEMPORARY_REASONS
            ]
            columns = {KEY_COLUMN: pa.array([keys[index] for index in added], pa.string())}
            writer.publish(Storage(self.folder), uuid4().hex, columns, left_out=left_out)

    def locate(self, keys: Mapping[int, str], errors: Mapping[int, AudioError]) -> StoredAudio:
        """Return where the audio of files is; keys and errors are by row."""
        all_errors, readable = dict(errors), []
        for row, key in keys.items():
            if key in self._unreadable:
                all_errors[row] = self._unreadable[key]
            else:
                readable.append(key)
        tables = [NO_AUDIO]
        for file, table in self._tables.items():
            audio = pa.repeat(str(file.with_suffix(".arrow")), len(table))
            if self._store == "none":
                names = table[KEY_COLUMN].combine_chunks()
                audio = pc.replace_substring_regex(names, KEY_STATE, "")
            stored = to_stored(table, audio, shard=0, sample_rate=self._sample_rate)
            tables.append(stored.add_column(0, KEY_COLUMN, table[KEY_COLUMN]))
        stored = pa.concat_tables(tables)
        rows = pc.index_in(pa.array(readable, pa.string()), value_set=stored[KEY_COLUMN])
        return StoredAudio(stored.take(rows).drop_columns([KEY_COLUMN]), all_errors)


def describe_folder(folder: Path, corpus: Path) -> None:
    """Record the path of the corpus in a folder of the cache."""
    if not (folder / CORPUS_FILE).is_file():
        write_text_atomically(folder / CORPUS_FILE, json.dumps({"folder": str(corpus)}) + "\n")


# Archives


def is_archive(path: Path) -> bool:
    """Check whether a path is a file with the name of a tar file."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.expanduser().is_file()


def unpack_corpus(data_folder: str | Path | None) -> Path:
    """Return the absolute path of a corpus; an archive is unpacked into the cache once.

    Only files and folders are unpacked, no links and no devices. An archive with another path, size
    or time of change is unpacked again.
    """
    if not data_folder:
        raise DataError(
            "This corpus is read from a folder, but `data_folder` names none. Pass "
            "--data_folder=FOLDER."
        )
    corpus = Path(data_folder).expanduser().absolute()
    if not is_archive(corpus):
        return corpus
    archive, status = corpus.resolve(), corpus.stat()
    identity = f"{archive}\n{status.st_size}\n{status.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
    folder = default_cache() / EXTRACTED_FOLDER / f"{archive.name}-{key}"
    if not folder.is_dir():
        logger.info(f"unpacking {archive} into {folder}, once")
        with writing(folder.parent), building(folder) as beside:
            _extract(archive, beside)
            describe_folder(beside, archive)
    return _innermost(folder)


def _extract(archive: Path, folder: Path) -> None:
    """Write the files of an archive into a folder; read it to the end, where its checksum is."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined] # 0.9 GB for two million clips
                path = PurePosixPath(member.name)  # Python before 3.11.4 has no filter for it
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"{member.name[:200]!r} is outside its folder")
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with content, (folder / path).open("wb") as target:
                        shutil.copyfileobj(content, target, COPY_BYTES)
            while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
                pass
    except Exception as error:  # the libraries that unpack raise many kinds of errors
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{archive} cannot be unpacked as a tar file ({str(error)[:200]}). Download it again."
        ) from error


def _innermost(folder: Path) -> Path:
    """Return the first folder, going down, that has more in it than one other folder."""
    entries = [entry for entry in folder.iterdir() if entry.name != CORPUS_FILE]
    is_single = len(entries) == 1 and entries[0].is_dir() and entries[0].name != "clips"
    return _innermost(entries[0]) if is_single else folder


# Listing and pruning


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache, and its size on the disk."""

    folder: Path
    corpus: Path | None  # the folder or file that its audio comes from, if known
    bytes: int

    @property
    def is_orphan(self) -> bool:
        """Whether the corpus was removed; one without access may still exist."""
        try:
            return self.corpus is not None and not self.corpus.exists()
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[CacheEntry]:
    """List the folders of the cache."""
    entries = []
    for name in (AUDIO_FOLDER, EXTRACTED_FOLDER):
        for folder in sorted((cache_folder / name).glob("*")):
            if folder.is_dir() and not folder.is_symlink():  # a link may lead out of the cache
                file = folder / CORPUS_FILE
                corpus = Path(json.loads(file.read_text())["folder"]) if file.is_file() else None
                size = sum(path.lstat().st_size for path in folder.rglob("*"))
                entries.append(CacheEntry(folder, corpus, size))
    return entries


def remove_entry(entry: CacheEntry) -> bool:
    """Remove a folder of the cache; return False if a process is preparing it."""
    lock = os.open(entry.folder, os.O_RDONLY)
    try:
        if not try_lock(lock):
            return False
        for table in entry.folder.glob("*.parquet"):  # first, since a shard needs its table
            table.unlink()
        shutil.rmtree(entry.folder)
    except OSError as error:
        raise DataError(f"{entry.folder} cannot be removed: {error.strerror}.") from error
    finally:
        os.close(lock)
    return True


def print_entries(cache_folder: Path) -> None:
    """Print the folders of the cache, a line each, and their total size."""
    entries = list_entries(cache_folder)
    for entry in entries:
        corpus = "unknown" if entry.corpus is None else str(entry.corpus)
        corpus += " (gone)" if entry.is_orphan else ""
        print(printable(f"{_megabytes(entry.bytes):>9}  {corpus}, in {entry.folder}"))
    total = sum(entry.bytes for entry in entries)
    print(f"{_megabytes(total)} in {plural(len(entries), 'folder')} of {cache_folder}")


def prune_orphans(cache_folder: Path) -> None:
    """Remove the folders of removed corpora, and print each."""
    for entry in list_entries(cache_folder):
        if entry.is_orphan:
            outcome = "removed" if remove_entry(entry) else "kept, since a process is preparing it:"
            size = _megabytes(entry.bytes)
            print(printable(f"{outcome} {entry.folder} ({size}) of {entry.corpus}"))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
