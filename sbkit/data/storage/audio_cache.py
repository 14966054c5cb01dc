"""The cache of decoded audio: what a corpus folder holds is decoded once for all its splits.

A clip is known by its path, size and time of change. Its text is not kept: correcting a transcript
decodes nothing. Clips are decoded in blocks, each by the process that holds its lock file, into a
shard. A killed process loses its current block.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing, share_lock, try_lock, write_text_atomically
from sbkit.data.corpora.clips import Paths
from sbkit.data.storage.audio_store import AUDIO, PLACE
from sbkit.data.storage.decode import decode_clips, decoding_progress
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.shard import (
    ShardWriter,
    read_table,
    remove_leftovers,
    share_work,
    to_places,
)
from sbkit.logs.log import log

CACHE_VERSION = 2  # raise it when the same clip would give other audio
AUDIO_FOLDER = "audio"  # of the cache
EMBEDDED_FOLDER = "embedded"  # of the cache: files that a dataset or an archive held itself
CORPUS_FILE = "corpus.json"  # in a folder of the cache: whose audio it holds
BLOCK_CLIPS = 1000  # of 5 s at 16 kHz they are 160 MB
BLOCK_BYTES = 200_000_000  # of their files; a longer clip has a block of its own
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEY = "clip"  # the column of a shard's table that says which state of which file a clip was
PASSING = ("missing", "unreachable")  # reasons that may be gone tomorrow


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if own := os.environ.get("SBKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "sbkit"
    except RuntimeError as error:  # as in a container whose user has no entry
        raise SbkitError(
            "The cache must lie in a folder, but this user has no home. Let SBKIT_CACHE name one."
        ) from error


NO_AUDIO = pa.schema(
    {KEY: pa.string(), "samples": pa.int64(), "digest": pa.string(), AUDIO: PLACE}
).empty_table()


class StoredAudio(NamedTuple):
    """The audio of clips: columns samples, digest and audio, and by row what has none.

    The table is without the rows that have an error.
    """

    table: pa.Table
    errors: dict[int, AudioError]


@dataclass(frozen=True)
class AudioCache:
    """The shards of one corpus folder, at one sample rate (Hz) and in one store."""

    corpus: Path
    sample_rate: int
    store: str
    folder: Path

    @staticmethod
    def of(paths: Paths, sample_rate: int, cache_folder: Path, store: str = "pcm") -> "AudioCache":
        """Return the cache of the folder that all clips have in common."""
        parents = {path[: path.rfind("/") + 1] for path in paths}  # "/" for a clip in the root
        corpus = Path(os.path.commonpath([Path(os.path.abspath(each)) for each in parents]))  # noqa: PTH100
        identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}\n{store}"
        key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
        name = f"{corpus.parent.name}-{corpus.name}-{key}".lstrip("-.")
        folder = cache_folder.expanduser() / AUDIO_FOLDER / name
        return AudioCache(corpus, sample_rate, store, folder)

    def prepare(self, paths: Paths, *, title: str) -> StoredAudio:
        """Return where the audio of each clip is, after decoding those that are not there yet.

        Raises:
            SbkitError: the cache cannot be written, or its disk is full.
        """
        states = [self._state(path) for path in paths]
        listing = Listing(self.folder)
        listing.look()
        if missing := _missing(states, listing):
            with self._write_access():
                describe_folder(
                    self.folder, self.corpus, sample_rate=self.sample_rate, store=self.store
                )
                _Filling(self, listing, paths, states).run(missing, title)
        note_use(self.folder)
        return self._locate(paths, states, listing)

    def _locate(
        self, paths: Paths, states: Sequence["ClipState | AudioError"], listing: "Listing"
    ) -> StoredAudio:
        errors = dict[int, AudioError]()
        keys = list[str]()
        for row, state in enumerate(states):
            error = state if isinstance(state, AudioError) else listing.unreadable.get(state.key)
            if error is not None:
                errors[row] = error
            elif isinstance(state, ClipState):
                keys.append(state.key)
        stored = listing.places(self.sample_rate)
        table = stored.take(pc.index_in(pa.array(keys, pa.string()), value_set=stored[KEY]))
        table = table.drop_columns([KEY])
        if self.store == "none":
            own = np.setdiff1d(np.arange(len(states)), list(errors))
            files = paths.column.take(pa.array(own, pa.int64())).cast(pa.string())
            fields = dict(zip(PLACE.names, table[AUDIO].combine_chunks().flatten(), strict=True))
            columns = [*(fields | {"file": files.combine_chunks()}).values()]
            places = pa.StructArray.from_arrays(columns, fields=list(PLACE))
            table = table.set_column(table.column_names.index(AUDIO), AUDIO, places)
        return StoredAudio(table, errors)

    def _state(self, path: str) -> "ClipState | AudioError":
        try:
            status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
            relative = self._relative(path)
            os.fsencode(relative).decode("utf-8")
        except FileNotFoundError:
            sentence = f"{path} must be an audio file, but it is missing. Correct the path."
            return AudioError("missing", sentence)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "its name is not UTF-8"
            sentence = f"{path} must be an audio file, but cannot be reached ({reason}). Repair it."
            return AudioError("unreachable", sentence)
        return ClipState(f"{relative}\t{status.st_size}\t{status.st_mtime_ns}", status.st_size)

    def _relative(self, path: str) -> str:
        name = path.rfind("/") + 1
        return _relative_folder(path[:name], self.corpus) + path[name:]

    @contextmanager
    def _write_access(self) -> Iterator[None]:
        """Make the folder and hold a shared lock on it; clean up first if no process has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if try_lock(lock, without_locks=False):
                remove_leftovers(self.folder)
                for audio in self.folder.glob("*.arrow"):
                    if not audio.with_suffix(".parquet").is_file():
                        audio.unlink()
            share_lock(lock)
            yield
        except OSError as error:
            if error.errno in (*READ_ONLY, *DISK_FULL):
                raise self._unwritable(error) from error
            raise
        finally:
            os.close(lock)

    def _unwritable(self, error: OSError) -> SbkitError:
        if error.errno not in DISK_FULL:
            return SbkitError(
                f"{self.folder} must be a folder to write to, but is not: {error.strerror}. Choose "
                "another one; SBKIT_CACHE names that of prepared data."
            )
        free = shutil.disk_usage(nearest_existing(self.folder)).free / 1e9
        return SbkitError(
            f"The disk of {self.folder} must have room for prepared audio, but is full ({free:.1f} "
            "GB are free). Free some, with `sbkit cache prune` or by hand, let SBKIT_CACHE name a "
            "folder on another disk, or keep less: --audio_store=flac, or none. The shards that "
            "are finished stay, and the same command continues from there."
        )


class ClipState(NamedTuple):
    """An audio file as it is now: its path in the corpus, size and time of change; and its size."""

    key: str
    size: int


class Listing:
    """What the shards of a folder hold; each table is read once.

    unreadable: by its key, why a file holds no usable audio.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[Path, pa.Table] = {}
        self.unreadable: dict[str, AudioError] = {}

    def look(self) -> set[str]:
        """Read the tables that are new, and return the keys of what they say."""
        new = set[str]()
        for file in sorted({*self._folder.glob("*.parquet")} - self._tables.keys()):
            audio = file.with_suffix(".arrow")
            try:
                table, facts = read_table(file.read_bytes())
                if facts.bytes and audio.stat().st_size != facts.bytes:
                    raise ValueError(f"{audio.name} has not the {facts.bytes} bytes written to it")
            except (OSError, ValueError, LookupError, TypeError) as error:
                log(f"{audio} is damaged ({error}); its clips are decoded again.")
                with suppress(OSError):
                    file.unlink()
                continue
            self._tables[file] = table
            bad = {key: AudioError(*why) for key, *why in facts.left_out}
            self.unreadable |= bad
            new.update(bad, table[KEY].to_pylist())
        return new

    def keys(self) -> list[pa.ChunkedArray]:
        """Return the keys of the clips in every shard."""
        return [chunk for table in self._tables.values() for chunk in table[KEY].chunks]

    def places(self, sample_rate: int) -> pa.Table:
        """Return the key, samples, digest and place of every clip."""
        parts = [NO_AUDIO]
        for file, table in self._tables.items():
            audio = pa.repeat(str(file.with_suffix(".arrow")), len(table))
            places = to_places(table, audio, shard=0, sample_rate=sample_rate)
            digests = pc.struct_field(table[AUDIO], "digest")
            columns = [table[KEY], table["samples"], digests, places]
            parts.append(pa.table(columns, schema=NO_AUDIO.schema))
        return pa.concat_tables(parts)


class _Filling:
    """One process's share of the decoding."""

    def __init__(
        self,
        cache: AudioCache,
        listing: Listing,
        paths: Paths,
        states: Sequence[ClipState | AudioError],
    ) -> None:
        self._cache, self._listing, self._paths, self._states = cache, listing, paths, states
        self._done = set[str]()  # what was found since the work began

    def run(self, missing: Sequence[int], title: str) -> None:
        """Decode the missing rows; what is finished stays, whatever happens."""
        wanted = set(missing)
        self._done |= self._listing.look()
        blocks = [block for block in self._blocks() if not wanted.isdisjoint(block)]
        with decoding_progress(title, len(missing)) as self._count:
            works = [
                (self._key(block[0]) + self._key(block[-1]), partial(self._decode, block, wanted))
                for block in blocks
            ]
            share_work(self._cache.folder, works)
        self._listing.look()

    def _key(self, row: int) -> str:
        state = self._states[row]
        assert isinstance(state, ClipState)
        return state.key

    def _blocks(self) -> Iterator[list[int]]:
        """Divide all rows that have a file, in the same way in every process."""
        block, size = list[int](), 0
        for row, state in enumerate(self._states):
            if isinstance(state, AudioError):
                continue
            if block and (len(block) == BLOCK_CLIPS or size + state.size > BLOCK_BYTES):
                yield block
                block, size = [], 0
            block.append(row)
            size += state.size
        if block:
            yield block

    def _decode(self, block: Sequence[int], wanted: Set[int]) -> None:
        """Decode a block, less what others have done, into a shard."""
        self._done |= self._listing.look()
        rows = {self._key(row): row for row in block if row in wanted}
        rows = {key: row for key, row in rows.items() if key not in self._done}
        if not rows:
            return
        paths = [Path(os.fsdecode(self._paths.column[row].as_py())) for row in rows.values()]
        writer, keys, bad = ShardWriter(self._cache.folder), list[str](), list[Sequence[str]]()
        try:
            decoding = decode_clips(paths, self._cache.sample_rate, store=self._cache.store)
            for key, path, decoded in zip(rows, paths, decoding, strict=True):
                self._count()
                if not isinstance(decoded.audio, AudioError):
                    writer.add(path.name, decoded)
                    keys.append(key)
                elif decoded.audio.reason in PASSING:
                    self._listing.unreadable[key] = decoded.audio
                else:
                    bad.append((key, decoded.audio.reason, str(decoded.audio)))
            storage = Storage(str(self._cache.folder))
            columns = {KEY: pa.array(keys, pa.string())}
            writer.publish(storage, uuid4().hex, columns, left_out=bad)
        finally:
            writer.discard()


def _missing(states: Sequence[ClipState | AudioError], listing: Listing) -> list[int]:
    """Return the rows whose file is there, and was not decoded yet."""
    rows = [row for row, state in enumerate(states) if isinstance(state, ClipState)]
    keys = pa.array([state.key for state in states if isinstance(state, ClipState)], pa.string())
    known = pa.chunked_array([*listing.keys(), pa.array(listing.unreadable, pa.string())])
    found = pc.is_in(keys, value_set=known).to_pylist()
    return [row for row, is_there in zip(rows, found, strict=True) if not is_there]


def describe_folder(folder: Path, corpus: Path, **facts: object) -> None:
    """Note whose audio a folder of the cache holds, unless that is noted."""
    if not (folder / CORPUS_FILE).is_file():
        text = json.dumps({"folder": str(corpus), **facts})
        write_text_atomically(folder / CORPUS_FILE, text + "\n")


def note_use(folder: Path) -> None:
    """Note that a folder of the cache was used now, where that can be written."""
    with suppress(OSError):
        os.utime(folder / CORPUS_FILE)


@lru_cache(maxsize=1000)
def _relative_folder(folder: str, corpus: Path) -> str:
    relative = os.path.relpath(folder or ".", corpus)
    return "" if relative == "." else f"{relative}/"
