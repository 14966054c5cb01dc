"""The cache of decoded audio: each clip is decoded once, and read from there by every later run.

A clip is identified by the path, the size and the modification time of its file, and by its
position if it is a part of the file. Its text is not kept, so correcting a transcript decodes
nothing. The clips of a split are stored in one folder of the cache, which is named after the folder
that contains them all; splits with the same such folder share their clips. Clips are decoded in
blocks: the process that holds a block's lock file decodes it into a shard. A killed process loses
its current block.

The cache also keeps unpacked archives, and audio files that were inside datasets.
"""

import hashlib
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioPart
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import (
    LOCK_FILE,
    atomic_folder,
    is_abandoned,
    lock_shared,
    open_lock,
    try_lock,
    write_text_atomically,
)
from sbkit.base.messages import listed, plural, printable
from sbkit.base.versions import audio_reader
from sbkit.data.clips import by_file
from sbkit.data.filesystem import Storage, disk_errors, iter_members, unpacking_errors
from sbkit.data.manifest import DURATION_COLUMN, MIX_FAULT, Manifest, parse_durations, part_columns
from sbkit.data.shard import (
    AUDIO,
    AUDIO_TYPE,
    ShardWriter,
    has_mix_faults,
    read_shard_table,
    remove_leftovers,
    share_work,
    to_located_audio,
)
from sbkit.logs.progress import progress_bar

logger = logging.getLogger(__name__)

CACHE_VERSION = 6  # raise it if the same clip would give other audio, or tables other columns
AUDIO_FOLDER = "audio"  # of the cache
EXTRACTED_FOLDER = "embedded"  # of the cache: files that were in a dataset or an archive
PREPARED_FOLDER = "prepared"  # of the cache: the tables of `sbkit.data.prepared`
CORPUS_FILE = "corpus.json"  # in a folder of the cache: the path of its corpus
BLOCK_CLIPS = 1000  # 160 MB if they last 5 s at 16 kHz
BLOCK_BYTES = 200_000_000  # most bytes of audio files in a block
# Not recorded: at the next attempt the file may be there.
TEMPORARY_REASONS = ("missing", "unreachable")
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
COPY_BYTES = 1 << 20

is_verifying = ContextVar("is_verifying", default=False)  # nothing prepared earlier is believed


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``.

    `sbkit.base.user` sets XDG_CACHE_HOME for users without a home to write to.
    """
    if folder := os.environ.get("SBKIT_CACHE"):
        return Path(folder).expanduser()
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(parent).expanduser() / "sbkit"


@contextmanager
def verifying() -> Iterator[None]:
    """Prepare all splits again, and ask again whether unreadable files can be read."""
    before = is_verifying.set(True)
    try:
        yield
    finally:
        is_verifying.reset(before)


# Decoded audio

NO_AUDIO = pa.schema(
    {"samples": pa.int64(), "digest": pa.string(), MIX_FAULT: pa.string(), AUDIO: AUDIO_TYPE}
).empty_table()


class ClipKey(NamedTuple):
    """The identity of a clip. The fields are also columns of the table of a shard."""

    path: str
    file_size: int  # bytes
    mtime_ns: int  # modification time; negative before 1970
    part_start: int  # microseconds
    part_end: int | None  # microseconds; None: the end of the file
    part_channel: int | None  # counted from 0; None: all are mixed

    @property
    def part(self) -> AudioPart:
        return AudioPart(self.path, self.part_start, self.part_end, self.part_channel)


class StoredAudio(NamedTuple):
    """Where the audio of clips is."""

    # The columns samples, digest and audio of the readable clips, and mix_fault if there is any
    table: pa.Table
    errors: dict[int, AudioError]  # of the unreadable clips, by row


def cache_audio(
    manifest: Manifest, *, sample_rate: int, cache_folder: Path, store: str, title: str
) -> StoredAudio:
    """Locate the audio of clips, after decoding those that are not in the cache yet.

    ``sample_rate`` is in Hz, ``store`` is pcm or flac, and ``title`` is shown while clips are
    decoded. All clips share one folder of the cache, named after the folder that contains them all.
    """
    if not len(manifest):
        return StoredAudio(NO_AUDIO.drop_columns([MIX_FAULT]), {})
    parents = {path[: path.rfind("/") + 1] for path in manifest.paths}  # "/" for the root
    corpus = Path(os.path.commonpath([Path(os.path.abspath(path)) for path in parents]))  # noqa: PTH100
    identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}\n{store}"
    name = f"{corpus.parent.name}-{corpus.name}-{_short_digest(identity)}".lstrip("-.")
    shards = _CorpusShards(cache_folder / AUDIO_FOLDER / name, sample_rate, store)
    keys, errors = _file_keys(manifest)
    shards.read_new()
    missing = {key for key in keys.values() if not shards.has(key)}
    if missing:
        if DURATION_COLUMN in manifest.rows.column_names:
            hours = np.nansum(parse_durations(manifest.rows[DURATION_COLUMN])) / 3600
            clips = plural(len(manifest), "clip")
            logger.info(f"{title}: {clips}, {hours:.2f} h by the durations that the corpus states")
        with _write_access(shards.folder), progress_bar(title, len(missing)) as advance:
            describe_folder(shards.folder, corpus)
            tasks = [
                (f"{block[0]} {block[-1]}", partial(shards.decode, block, partial(advance, 1)))
                for block in _divide([*keys.values()])
                if not missing.isdisjoint(block)
            ]
            share_work(shards.folder, tasks)
            shards.read_new()
    return shards.locate(keys, errors)


def plan_audio(manifest: Manifest, sample_rate: int) -> StoredAudio:
    """Locate clips without decoding one: their lengths are the durations that the corpus states.

    Raises ConfigError if clips are parts of files, or have no duration.
    """
    if manifest.has_parts:
        raise ConfigError(
            "`audio_store: lazy` decodes whole files, but some clips are parts or channels. "
            "Choose pcm or flac."
        )
    rows = manifest.rows
    durations = pa.chunked_array([pa.nulls(len(rows), pa.string())])
    if DURATION_COLUMN in rows.column_names:
        durations = rows[DURATION_COLUMN]
    seconds = parse_durations(durations)
    is_empty = pc.match_substring_regex(durations.fill_null(""), r"^0+(\.0*)?$").to_numpy()
    unknown = np.flatnonzero(np.isnan(seconds) & ~is_empty)
    if len(unknown):
        raise ConfigError(
            f"`audio_store: lazy` needs the length of every clip in a column {DURATION_COLUMN}, or "
            "in clip_durations.tsv of a Common Voice release, but "
            f"{listed(rows['id'].take(unknown).to_pylist())} have none. Choose pcm or flac, which "
            "decode all clips first."
        )
    sizes = np.zeros(len(rows), np.int64)
    errors: dict[int, AudioError] = {}
    for row, path in enumerate(manifest.paths):
        status = _stat(path)
        if isinstance(status, AudioError):
            errors[row] = status
        elif is_empty[row]:
            errors[row] = AudioError("no samples", f"The corpus states 0 ms for {path}.")
        else:
            sizes[row] = status.st_size
    is_readable = np.ones(len(rows), bool)
    is_readable[[*errors]] = False
    count = int(is_readable.sum())
    samples = pa.array(np.rint(seconds[is_readable] * sample_rate).astype(np.int64))
    readable_sizes = pa.array(sizes[is_readable])
    locations = {
        "file": rows["audio"].filter(pa.array(is_readable)).cast(pa.string()),
        "shard": pa.repeat(0, count),
        "start": pa.nulls(count, pa.int64()),
        "size": readable_sizes,
        "crc32": pa.nulls(count, pa.int64()),
        "sample_rate": pa.repeat(sample_rate, count),
    }
    facts = (readable_sizes.cast(pa.string()), samples.cast(pa.string()))
    columns = {
        "samples": samples,
        "digest": pc.binary_join_element_wise(facts[0], " bytes, ", facts[1], " samples", ""),
        AUDIO: pa.table(locations, pa.schema(list(AUDIO_TYPE))).to_struct_array(),
    }
    return StoredAudio(pa.table(columns), errors)


def _short_digest(identity: str) -> str:
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]


@contextmanager
def _write_access(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing, and hold a shared lock on it.

    If no other process holds the lock, first remove what killed processes have left in the folder.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder)
        try:
            if try_lock(lock, if_unsupported=False):
                remove_leftovers(folder)
                for audio in folder.glob("*.arrow"):
                    if not audio.with_suffix(".parquet").is_file() and is_abandoned(audio):
                        audio.unlink(missing_ok=True)
            lock_shared(lock)
            yield
        finally:
            os.close(lock)


def _file_keys(manifest: Manifest) -> tuple[dict[int, ClipKey], dict[int, AudioError]]:
    """Return the keys of the files that can be reached, and the errors of the others, by row."""
    keys: dict[int, ClipKey] = {}
    errors: dict[int, AudioError] = {}
    for row, (path, start, end, channel) in enumerate(manifest.parts):
        status = _stat(path)
        if isinstance(status, AudioError):
            errors[row] = status
        else:
            keys[row] = ClipKey(path, status.st_size, status.st_mtime_ns, start, end, channel)
    return keys, errors


def _stat(path: str) -> os.stat_result | AudioError:
    """Return the status of a file, or why it cannot be reached."""
    try:
        path.encode()  # it becomes text in a table
        return os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
    except (OSError, ValueError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else "unreachable"
        detail = getattr(error, "strerror", None) or "its name is not UTF-8"
        return AudioError(reason, f"{path} is {reason} ({detail}). Repair it.")


def _divide(keys: Iterable[ClipKey]) -> list[list[ClipKey]]:
    """Divide keys into blocks, one for each shard, in the same way in every process.

    All parts of a file are in one block, since the file is read for each block.
    """
    distinct = [*dict.fromkeys(keys)]
    blocks: dict[int, list[ClipKey]] = {}
    num_bytes = 0
    number = 0  # of the block
    path = None
    for index, row in enumerate(by_file(key.part for key in distinct)):
        key = distinct[row]
        if key.path != path:
            path = key.path
            num_bytes += key.file_size
            number = num_bytes // BLOCK_BYTES + index // BLOCK_CLIPS
        blocks.setdefault(number, []).append(key)
    return [*blocks.values()]


class _CorpusShards:
    """The shards of one corpus folder, at one sample rate (Hz) and in one store."""

    def __init__(self, folder: Path, sample_rate: int, store: str) -> None:
        self.folder = folder
        self._sample_rate = sample_rate
        self._store = store
        self._tables: dict[Path, pa.Table] = {}
        self._rows: dict[ClipKey, int] = {}  # of decoded clips, in all tables one after another
        self._unreadable: dict[ClipKey, AudioError] = {}

    def has(self, key: ClipKey) -> bool:
        """Return whether a clip was decoded or is unreadable."""
        return key in self._rows or key in self._unreadable

    def read_new(self) -> None:
        for file in sorted({*self.folder.glob("*.parquet")} - self._tables.keys()):
            audio = file.with_suffix(".arrow")
            try:
                table, facts = read_shard_table(file.read_bytes())
                columns = [table[name].to_pylist() for name in ClipKey._fields]
                if audio.stat().st_size != facts.bytes:
                    raise ValueError(f"{audio.name} should have {facts.bytes} bytes")
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning(f"{audio} is damaged ({error}); its clips are decoded again.")
                with suppress(OSError):
                    file.unlink()
                continue
            first_row = sum(map(len, self._tables.values()))
            for row, values in enumerate(zip(*columns, strict=True), start=first_row):
                self._rows.setdefault(ClipKey(*values), row)
            for *fields, reason, message, reader in facts.left_out:
                if reader == audio_reader() and not is_verifying.get():
                    self._unreadable[ClipKey(*fields)] = AudioError(reason, message)
            self._tables[file] = table

    def decode(self, block: Sequence[ClipKey], on_clip: Callable[[], None]) -> None:
        """Decode a block into a shard, except for clips that other processes have decoded."""
        self.read_new()
        keys = [key for key in block if not self.has(key)]
        if not keys:
            return
        names = [Path(key.path).name for key in keys]
        parts = [key.part for key in keys]
        with closing(ShardWriter(self.folder)) as writer:
            added_indices, errors = writer.add_clips(
                names, parts, self._sample_rate, store=self._store, on_clip=on_clip
            )
            left_out = []
            for index, error in errors.items():
                self._unreadable[keys[index]] = error
                if error.reason not in TEMPORARY_REASONS:
                    left_out.append((*keys[index], error.reason, str(error), audio_reader()))
            added = [keys[index] for index in added_indices]
            columns = {
                "path": pa.array([key.path for key in added], pa.string()),
                "file_size": pa.array([key.file_size for key in added], pa.int64()),
                "mtime_ns": pa.array([key.mtime_ns for key in added], pa.int64()),
                **part_columns(key.part for key in added),
            }
            writer.publish(Storage(self.folder), uuid4().hex, columns, left_out=left_out)

    def locate(self, keys: Mapping[int, ClipKey], errors: Mapping[int, AudioError]) -> StoredAudio:
        """Return where the audio of files is; keys and errors are by row."""
        all_errors = dict(errors)
        stored_rows = []
        for row, key in keys.items():
            if key in self._rows:  # also one that an earlier verdict left out
                stored_rows.append(self._rows[key])
            else:
                all_errors[row] = self._unreadable[key]
        tables = [NO_AUDIO]
        for file, table in self._tables.items():
            audio = str(file.with_suffix(".arrow"))
            tables.append(to_located_audio(table, audio, shard=0, sample_rate=self._sample_rate))
        stored = pa.concat_tables(tables).take(pa.array(stored_rows, pa.int64()))
        if not has_mix_faults(stored):
            stored = stored.drop_columns([MIX_FAULT])
        return StoredAudio(stored, all_errors)


def describe_folder(folder: Path, corpus: Path) -> None:
    """Record the path of the corpus in a folder of the cache."""
    if not (folder / CORPUS_FILE).is_file():
        write_text_atomically(folder / CORPUS_FILE, json.dumps({"folder": str(corpus)}) + "\n")


# Archives


def is_archive(path: Path) -> bool:
    """Check whether a path is a file with the name of a tar file."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.expanduser().is_file()


def unpack_corpus(data_folder: str | Path | None) -> Path:
    """Return the absolute path of a corpus; if it is an archive, unpack it into the cache first.

    An archive is unpacked once, and again if its path, size or modification time changes. Its files
    are unpacked, and hard links to them as copies. Symbolic links and devices are skipped.
    """
    if not data_folder:
        raise DataError(
            "This corpus is read from a folder, but `data_folder` names none. Name the folder."
        )
    corpus = Path(data_folder).expanduser().absolute()
    if not is_archive(corpus):
        return corpus
    archive = corpus.resolve()
    status = archive.stat()
    digest = _short_digest(f"{archive}\n{status.st_size}\n{status.st_mtime_ns}")
    folder = default_cache() / EXTRACTED_FOLDER / f"{archive.name}-{digest}"
    if not folder.is_dir():
        logger.info(f"unpacking {archive} into {folder}, once")
        with disk_errors(folder.parent), atomic_folder(folder) as temporary:
            _extract(archive, temporary)
            describe_folder(temporary, archive)
    return _innermost(folder)


def _extract(archive: Path, folder: Path) -> None:
    num_skipped = 0
    failure = f"{archive} cannot be unpacked as a tar file"
    with unpacking_errors(failure, fix="Download it again."), tarfile.open(archive) as tar:
        for member in iter_members(tar):
            if not member.isdir() and not _extract_member(tar, member, archive, folder):
                num_skipped += 1
        # The checksum of a compressed archive follows its last member.
        while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
            pass
    if num_skipped:
        logger.warning(
            f"{plural(num_skipped, 'entry', 'entries')} of {archive} skipped: symbolic links, "
            "devices, or hard links to files that are not in the archive."
        )


def _extract_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path, folder: Path
) -> bool:
    """Write a file, or copy the file of a hard link; return False for any other member."""
    path = PurePosixPath(member.name)  # Python before 3.11.4 has no filter for it
    name = member.name[:200]
    if _is_outside(path):
        raise DataError(
            f"{archive} is not unpacked, because it would write outside of its own folder, to "
            f"{name!r}. Get it from a source that you trust."
        )
    target = folder / path
    if member.islnk():
        linked = PurePosixPath(member.linkname)
        # A hard link follows the file that it names.
        if _is_outside(linked) or not (folder / linked).is_file():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / linked, target)
        return True
    content = tar.extractfile(member) if member.isfile() else None
    if content is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file, COPY_BYTES)
    return True


def _is_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts


def _innermost(folder: Path) -> Path:
    """Return the corpus in an unpacked archive: skip folders that contain only another folder."""
    entries = [entry for entry in folder.iterdir() if entry.name not in (CORPUS_FILE, LOCK_FILE)]
    is_wrapper = len(entries) == 1 and entries[0].is_dir() and entries[0].name != "clips"
    return _innermost(entries[0]) if is_wrapper else folder


# Listing and pruning


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache."""

    folder: Path
    corpus: Path | None  # the folder or file that its audio comes from, if known
    size: int  # bytes on the disk
    is_superseded: bool = False  # by splits of the same settings that were prepared later

    @property
    def is_orphan(self) -> bool:
        """Whether nothing needs it. A corpus that cannot be accessed may still exist."""
        if self.is_superseded:
            return True
        try:
            return self.corpus is not None and not self.corpus.exists()
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[CacheEntry]:
    """List the folders of the cache."""
    entries = []
    # Extracted files first: once `prune_orphans` has removed them, the audio decoded from them is
    # an orphan, too.
    for name in (EXTRACTED_FOLDER, AUDIO_FOLDER):
        for folder in sorted((cache_folder / name).glob("*")):
            if folder.is_dir() and not folder.is_symlink():  # a link may lead out of the cache
                entries.append(CacheEntry(folder, _read_corpus(folder), _size_of(folder)))
    prepared = sorted((cache_folder / PREPARED_FOLDER).glob("*-*"), key=lambda f: f.stat().st_mtime)
    newest = {folder.name.rpartition("-")[0]: folder for folder in prepared}
    for folder in prepared:
        is_superseded = folder not in newest.values()
        entry = CacheEntry(folder, _read_corpus(folder), _size_of(folder), is_superseded)
        entries.append(entry)
    return entries


def _read_corpus(folder: Path) -> Path | None:
    """Return the path of the corpus that a folder of the cache records, None if there is none."""
    try:
        return Path(json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process may remove files meanwhile
            size += path.lstat().st_size
    return size


def remove_entry(entry: CacheEntry) -> bool:
    """Remove a folder of the cache; return False if a process is preparing it."""
    try:
        lock = open_lock(entry.folder)
        try:
            if not try_lock(lock):
                return False
            for table in entry.folder.glob("*.parquet"):  # first, since a shard needs its table
                table.unlink()
        finally:
            os.close(lock)
        shutil.rmtree(entry.folder)  # NFS would keep a file that is open
    except OSError as error:
        raise DataError(f"{entry.folder} cannot be removed: {error.strerror}.") from error
    return True


def print_entries(cache_folder: Path) -> None:
    """Print the folders of the cache, a line each, and their total size."""
    entries = list_entries(cache_folder)
    for entry in entries:
        corpus = "unknown" if entry.corpus is None else str(entry.corpus)
        if entry.is_orphan:
            corpus += " (not needed)"
        print(printable(f"{_format_size(entry.size):>9}  {corpus}, in {entry.folder}"))
    total = _format_size(sum(entry.size for entry in entries))
    print(f"{total} in {plural(len(entries), 'folder')} of {cache_folder}")


def prune_orphans(cache_folder: Path) -> None:
    """Remove the folders whose corpus is gone, and print each."""
    for entry in list_entries(cache_folder):
        if not entry.is_orphan:
            continue
        description = f"{entry.folder} ({_format_size(entry.size)}) of {entry.corpus}"
        if remove_entry(entry):
            print(printable(f"removed {description}"))
        else:
            print(printable(f"kept, since a process is preparing it: {description}"))


def _format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
