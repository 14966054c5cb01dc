"""The cache of decoded audio: each clip is decoded once, and read from there by every later run.

A clip is identified by the content of its file, and by its position if it is a part of the file.
The clips of a corpus are stored in a folder, which is named after that of the corpus and after what
decodes them. The process that holds the lock file of a block of clips decodes it into a shard; a
killed process loses its current block.

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
from sbkit.base.content_cache import (
    NUM_CODE_DIGITS,
    caches,
    default_cache,
    file_digests,
    is_verifying,
    keep,
    name_in_caches,
    remove_files_of_other_code,
)
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import (
    LOCK_FILE,
    is_abandoned,
    lock_shared,
    open_lock,
    try_lock,
    write_text_atomically,
)
from sbkit.base.messages import listed, plural, printable
from sbkit.base.versions import audio_identity
from sbkit.data.clip_decoding import by_file, clip_digest
from sbkit.data.filesystem import Storage, disk_errors, iter_members, unpacking_errors
from sbkit.data.manifest import DURATION_COLUMN, MIX_FAULT, Manifest, parse_durations
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

AUDIO_FOLDER = "audio"  # of the cache
EXTRACTED_FOLDER = "embedded"  # of the cache: files that were in a dataset or an archive
PREPARED_FOLDER = "prepared"  # of the cache: the tables of `sbkit.data.prepared_splits`
CORPUS_FILE = "corpus.json"  # in a folder of the cache: the path of its corpus
BLOCK_CLIPS = 1000  # 160 MB if they last 5 s at 16 kHz
BLOCK_BYTES = 200_000_000  # most bytes of audio files in a block
# Not recorded: at the next attempt the file may be there.
TEMPORARY_REASONS = ("missing", "unreachable")
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
COPY_BYTES = 1 << 20
_MADE_FOLDERS, _TABLES = "[!.]*-*", "[!.]*.parquet"  # not lost+found, @eaDir, .Trash-1000, ._a
PATH_MARK = "\0"  # stands for the path of a file in a verdict

# Decoded audio

NO_AUDIO = pa.schema(
    {"samples": pa.int64(), "digest": pa.string(), MIX_FAULT: pa.string(), AUDIO: AUDIO_TYPE}
).empty_table()


FILES = pa.schema({"root": pa.binary(), "name": pa.binary(), "digest": pa.string()})


class CachedClip(NamedTuple):
    """A clip whose audio is in the cache, or comes there."""

    digest: str  # of its file, and its position in it
    part: AudioPart
    file_size: int  # bytes


class StoredAudio(NamedTuple):
    """Where the audio of clips is."""

    table: pa.Table  # samples, digest, audio and perhaps mix_fault of the readable clips
    errors: dict[int, AudioError]  # of the unreadable clips, by row
    files: pa.Table  # the columns of FILES: all files of the clips, null without a digest


def cache_audio(
    manifest: Manifest, *, sample_rate: int, store: str, title: str, roots: Sequence[Path] = ()
) -> StoredAudio:
    """Locate the audio of clips, after decoding those that are not in the cache yet.

    The clips of each of ``roots`` are decoded into a folder of the cache; ``title`` is shown then.
    """
    if not len(manifest):
        return StoredAudio(NO_AUDIO.drop_columns([MIX_FAULT]), {}, FILES.empty_table())
    files = find_current_files(manifest, roots)
    clips = [
        None if digest is None else CachedClip(clip_digest(digest, part), part, size)
        for digest, part, size in zip(files.digests, manifest.parts, files.sizes, strict=True)
    ]
    shards = _CachedShards(sample_rate, store)
    of_roots = {root: [*filter(None, map(clips.__getitem__, r))] for root, r in files.rows.items()}
    for root in of_roots:
        shards.read_new(root)
    missing = shards.missing(filter(None, clips))
    if missing:
        shards.read_others(missing, [*of_roots])
        missing = shards.missing(filter(None, clips))
    if missing:
        with progress_bar(title, len(missing)) as advance:
            for root, of_root in of_roots.items():
                shards.decode_missing(root, of_root, partial(advance, 1))
    return shards.locate(clips, files)


class CurrentFiles(NamedTuple):
    """The files of the clips of a manifest, as they are now."""

    rows: Mapping[Path, Sequence[int]]  # of the manifest, by the folder that contains the files
    digests: Sequence[str | None]  # of the file of each row; None if it cannot be reached
    sizes: Sequence[int]  # bytes, of these files
    errors: dict[int, AudioError]  # of the files that cannot be reached, by row
    table: pa.Table  # as `FILES`


def find_current_files(
    manifest: Manifest, roots: Sequence[Path], *, read: bool = True
) -> CurrentFiles:
    """Look at the files of all clips; see `file_digests`."""
    paths = [
        os.path.realpath(path) if "/../" in path else os.path.abspath(path)  # noqa: PTH100
        for path in manifest.paths
    ]
    digests: list[str | None] = [None] * len(paths)
    sizes = [0] * len(paths)
    errors: dict[int, AudioError] = {}
    tables = [FILES.empty_table()]
    groups = group_by_root(paths, roots)
    for root, rows in groups.items():
        rows_of: dict[str, list[int]] = {}  # by the name of a file
        for row in rows:
            rows_of.setdefault(paths[row].removeprefix(f"{root}/"), []).append(row)
        files = file_digests(root, [*rows_of], read=read)
        roots_of = pa.repeat(os.fsencode(root), len(rows_of))
        columns = {"root": roots_of, "name": map(os.fsencode, rows_of)}
        tables.append(pa.table({**columns, "digest": files.digests}, FILES))
        for index, (digest, of_file) in enumerate(
            zip(files.digests.to_pylist(), rows_of.values(), strict=True)
        ):
            for row in of_file:
                digests[row], sizes[row] = digest, int(files.sizes[index])
                if index in files.errors:
                    errors[row] = _unreachable(paths[row], files.errors[index])
    return CurrentFiles(groups, digests, sizes, errors, pa.concat_tables(tables))


def group_by_root(paths: Sequence[str], roots: Sequence[Path]) -> dict[Path, list[int]]:
    """Group indices of paths by the narrowest root that contains them.

    The others are grouped by their common folder, extracted ones apart.
    """
    prefixes = sorted((f"{root}/" for root in roots), key=len, reverse=True)
    groups: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        groups.setdefault(prefix or f"{is_extracted(path)}", []).append(row)
    for name in ("True", "False"):
        if rows := groups.pop(name, []):
            parents = {paths[row].rpartition("/")[0] or "/" for row in rows}
            groups.setdefault(f"{os.path.commonpath(parents)}/", []).extend(rows)
    return {Path(prefix): rows for prefix, rows in groups.items()}


def is_extracted(path: str) -> bool:
    """Return whether a path lies in a cache, where it was extracted from a dataset or archive."""
    return path.startswith(tuple(f"{cache}/{EXTRACTED_FOLDER}/" for cache in caches()))


def _unreachable(path: str, error: OSError | ValueError) -> AudioError:
    reason = "missing" if isinstance(error, FileNotFoundError) else "unreachable"
    detail = getattr(error, "strerror", None) or str(error)
    return AudioError(reason, f"{path} is {reason} ({detail}).")


def plan_audio(manifest: Manifest, sample_rate: int, roots: Sequence[Path] = ()) -> StoredAudio:
    """Locate clips without decoding one: their lengths are the durations that the corpus states."""
    if manifest.has_parts:
        raise ConfigError(
            "`audio_store: lazy` decodes whole files, but some clips are parts or channels. "
            "Set `audio_store: flac`."
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
            f"`audio_store: lazy` needs a column {DURATION_COLUMN} for every clip, but "
            f"{listed(rows['id'].take(unknown).to_pylist())} have none. Set `audio_store: flac`."
        )
    files = find_current_files(manifest, roots, read=False)
    errors = files.errors
    for row, path in enumerate(manifest.paths):
        if path.encode(errors="ignore").decode() != path:  # it becomes text in a table
            errors[row] = _unreachable(path, ValueError("its name is not UTF-8"))
        if is_empty[row] and row not in errors:
            errors[row] = AudioError("no samples", f"The corpus states 0 ms for {path}.")
    is_readable = np.ones(len(rows), bool)
    is_readable[[*errors]] = False
    count = int(is_readable.sum())
    samples = pa.array(np.rint(seconds[is_readable] * sample_rate).astype(np.int64))
    readable_sizes = pa.array(np.array(files.sizes, np.int64)[is_readable])
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
    return StoredAudio(pa.table(columns), errors, files.table)


def _decoder_name() -> str:
    return audio_identity()[:NUM_CODE_DIGITS]


def _short_digest(identity: str) -> str:
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]


@contextmanager
def _write_access(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing, and hold a shared lock on it.

    If no other process holds it, first remove what killed processes have left there.
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


def _divide(clips: Iterable[CachedClip]) -> list[list[CachedClip]]:
    """Divide clips into blocks, one for each shard; parts of a file, read once, are in one."""
    distinct = [*{clip.digest: clip for clip in clips}.values()]
    blocks: dict[int, list[CachedClip]] = {}
    num_bytes = 0
    number = 0  # of the block
    path = None
    for index, row in enumerate(by_file(clip.part for clip in distinct)):
        clip = distinct[row]
        if clip.part.path != path:
            path = clip.part.path
            num_bytes += clip.file_size
            number = num_bytes // BLOCK_BYTES + index // BLOCK_CLIPS
        blocks.setdefault(number, []).append(clip)
    return [*blocks.values()]


class _CachedShards:
    """The shards in all caches, at one sample rate (Hz) and in one store."""

    def __init__(self, sample_rate: int, store: str) -> None:
        self._sample_rate = sample_rate
        self._store = store
        self._made_by = f"{_short_digest(f'{sample_rate} {store}')}-{_decoder_name()}"
        self._tables: dict[Path, pa.Table] = {}
        self._rows: dict[str, int] = {}  # by the digest, in all tables one after another
        self._unreadable: dict[str, AudioError] = {}  # by the digest

    def missing(self, clips: Iterable[CachedClip]) -> set[str]:
        """Return the digests of clips that were neither decoded nor found unreadable."""
        return {clip.digest for clip in clips} - self._rows.keys() - self._unreadable.keys()

    def _name(self, root: Path) -> str:
        name = printable(f"{root.parent.name}-{root.name}".lstrip("-."))
        return f"{AUDIO_FOLDER}/{name}-{_short_digest(printable(str(root)))}-{self._made_by}"

    def read_new(self, root: Path) -> None:
        for cache in caches():
            self._read_tables((cache / self._name(root)).glob(_TABLES))

    def read_others(self, digests: set[str], roots: Sequence[Path]) -> None:
        """Read the tables for other folders that have some of these clips, such as of a copy."""
        for cache in caches():
            for folder in sorted(cache.glob(f"{AUDIO_FOLDER}/*-{self._made_by}")):
                count = len(self._tables)
                self._read_tables(folder.glob(_TABLES), digests)
                if len(self._tables) > count:
                    describe_folder(folder, *roots)

    def _read_tables(self, files: Iterable[Path], wanted_digests: set[str] | None = None) -> None:
        """Read tables; of those that were not read yet, only the ones with a wanted clip."""
        for file in sorted({*files} - self._tables.keys()):
            audio = file.with_suffix(".arrow")
            try:
                table, facts = read_shard_table(file.read_bytes())
                if audio.stat().st_size != facts.bytes:
                    raise ValueError(f"{audio.name} should have {facts.bytes} bytes")
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning(f"{audio} is damaged ({error}); its clips are decoded again.")
                if file.is_relative_to(default_cache()):
                    with suppress(OSError):
                        file.unlink()
                continue
            digests = pc.struct_field(table[AUDIO], "digest").to_pylist()
            judged = {*digests, *(digest for digest, _, _ in facts.left_out)}
            if wanted_digests is not None and wanted_digests.isdisjoint(judged):
                continue
            first_row = sum(map(len, self._tables.values()))
            self._tables[file] = table
            for row, digest in enumerate(digests, start=first_row):
                self._rows.setdefault(digest, row)
            if not is_verifying.get():
                for digest, reason, message in facts.left_out:
                    self._unreadable[digest] = AudioError(reason, message)

    def decode_missing(
        self, root: Path, clips: Sequence[CachedClip], on_clip: Callable[[], None]
    ) -> None:
        missing = self.missing(clips)
        folder = default_cache() / self._name(root)
        tasks = [
            (f"{block[0].digest} {block[-1].digest}", partial(self._decode, root, block, on_clip))
            for block in _divide(clips)
            if not missing.isdisjoint(clip.digest for clip in block)
        ]
        if tasks:
            with _write_access(folder):
                describe_folder(folder, root)
                share_work(folder, tasks)
                self.read_new(root)

    def _decode(self, root: Path, block: Sequence[CachedClip], on_clip: Callable[[], None]) -> None:
        """Decode a block into a shard, except for clips that other processes have decoded."""
        self.read_new(root)
        missing = self.missing(block)
        clips = [clip for clip in block if clip.digest in missing]
        if not clips:
            return
        folder = default_cache() / self._name(root)
        names = [printable(Path(clip.part.path).name) for clip in clips]
        parts = [clip.part for clip in clips]
        with closing(ShardWriter(folder)) as writer:
            rows, errors = writer.add_clips(
                names, parts, self._sample_rate, store=self._store, on_clip=on_clip
            )
            for row, digest in zip(rows, writer.digests, strict=True):
                if digest != clips[row].digest:
                    raise DataError(
                        f"{clips[row].part.path} has changed while it was decoded. Start again."
                    )
            left_out = []
            for index, error in errors.items():
                clip = clips[index]
                message = str(error).replace(printable(clip.part.path), PATH_MARK)
                self._unreadable[clip.digest] = AudioError(error.reason, message)
                if error.reason not in TEMPORARY_REASONS:
                    left_out.append((clip.digest, error.reason, message))
            writer.publish(Storage(folder), uuid4().hex, {}, left_out=left_out)

    def locate(self, clips: Sequence[CachedClip | None], files: CurrentFiles) -> StoredAudio:
        errors = dict(files.errors)
        stored_rows = []
        for row, clip in enumerate(clips):
            if clip is None:
                continue
            if clip.digest in self._rows:  # also one that an earlier verdict left out
                stored_rows.append(self._rows[clip.digest])
            else:
                verdict = self._unreadable[clip.digest]
                message = verdict.args[0].replace(PATH_MARK, clip.part.path)
                errors[row] = AudioError(verdict.reason, message)
        tables = [NO_AUDIO]
        for file, table in self._tables.items():
            audio = name_in_caches(file.with_suffix(".arrow"))
            tables.append(to_located_audio(table, audio, shard=0, sample_rate=self._sample_rate))
        stored = pa.concat_tables(tables).take(pa.array(stored_rows, pa.int64()))
        if not has_mix_faults(stored):
            stored = stored.drop_columns([MIX_FAULT])
        return StoredAudio(stored, errors, files.table)


def describe_folder(folder: Path, *corpora: Path) -> None:
    """Record the paths of the corpora that use a folder of this cache, not of a shared one."""
    recorded_corpora = _read_corpora(folder)
    if folder.is_relative_to(default_cache()) and not {*corpora} <= {*recorded_corpora}:
        paths = sorted(map(str, {*recorded_corpora, *corpora}))
        with suppress(OSError):  # a cache may be read-only
            write_text_atomically(folder / CORPUS_FILE, json.dumps({"folders": paths}) + "\n")


# Archives


def is_archive(path: Path) -> bool:
    """Check whether a path is a file with the name of a tar file."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.expanduser().is_file()


def unpack_corpus(data_folder: str | Path | None) -> Path:
    """Return the absolute path of a corpus; if it is an archive, unpack it into the cache once.

    Hard links become copies. Symbolic links and devices are skipped.
    """
    if not data_folder:
        raise DataError("This corpus is read from a folder, but `data_folder` names none.")
    corpus = Path(data_folder).expanduser().absolute()
    if not is_archive(corpus):
        return corpus
    archive = corpus.resolve()
    files = file_digests(archive.parent, [archive.name])
    unpacked = keep(
        EXTRACTED_FOLDER,
        {"archive": files.digests.to_pylist()},
        partial(_unpack, archive),
        by_code=False,
        label=archive.name,
    )
    describe_folder(unpacked, archive)
    return _innermost(unpacked)


def _unpack(archive: Path, folder: Path) -> None:
    logger.info(f"unpacking {archive} into {folder.parent}, once")
    num_skipped = 0
    with (
        disk_errors(folder.parent),
        unpacking_errors(archive, "cannot be unpacked as a tar file", fix="Download it again."),
        tarfile.open(archive) as tar,
    ):
        folder.mkdir()
        for member in iter_members(tar):
            if not member.isdir() and not _extract_member(tar, member, archive, folder):
                num_skipped += 1
        # The checksum of a compressed archive follows its last member.
        while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
            pass
    if num_skipped:
        logger.warning(
            f"{plural(num_skipped, 'entry', 'entries')} of {archive} skipped: links or devices"
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
            f"{name!r}."
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
    corpora: Sequence[Path]  # the folders or files that its content comes from, if known
    size: int  # bytes on the disk
    is_superseded: bool = False  # by what was prepared later, or is decoded by other code

    @property
    def name(self) -> str:
        return ", ".join(map(str, self.corpora)) or "unknown"

    @property
    def is_orphan(self) -> bool:
        """Whether nothing needs it. A corpus that cannot be accessed may still exist."""
        if self.is_superseded:
            return True
        try:
            return bool(self.corpora) and not any(corpus.exists() for corpus in self.corpora)
        except OSError:
            return False


def list_entries(cache_folder: Path) -> list[CacheEntry]:
    """List the folders of the cache."""
    extracted, audio, prepared = (
        [
            folder
            for folder in sorted((cache_folder / name).glob(_MADE_FOLDERS))
            if folder.is_dir() and not folder.is_symlink()  # a link may lead out of the cache
        ]
        for name in (EXTRACTED_FOLDER, AUDIO_FOLDER, PREPARED_FOLDER)
    )
    prepared.sort(key=lambda folder: folder.stat().st_mtime)
    newest = {folder.name.rsplit("-", 2)[0]: folder for folder in prepared}  # by their labels
    superseded = {folder for folder in audio if not folder.name.endswith(_decoder_name())}
    superseded |= {*prepared} - {*newest.values()}
    # Extracted files first: once `prune_orphans` has removed them, the audio decoded from them is
    # an orphan, too.
    entries = []
    for folder in (*extracted, *audio, *prepared):
        size = 0
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process may remove files meanwhile
                size += path.lstat().st_size
        entries.append(CacheEntry(folder, _read_corpora(folder), size, folder in superseded))
    return entries


def _read_corpora(folder: Path) -> Sequence[Path]:
    """Return the paths of the corpora that use a folder of the cache; () if it does not tell."""
    try:
        folders = json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))["folders"]
        return [*map(Path, folders)]
    except (OSError, ValueError, LookupError, TypeError):
        return ()


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
        name = f"{entry.name} (not needed)" if entry.is_orphan else entry.name
        print(printable(f"{_format_size(entry.size):>9}  {name}, in {entry.folder}"))
    total = _format_size(sum(entry.size for entry in entries))
    print(f"{total} in {plural(len(entries), 'folder')} of {cache_folder}")


def prune_orphans(cache_folder: Path) -> None:
    """Remove the folders that nothing needs, and print each; and what other code has made."""
    for entry in list_entries(cache_folder):
        if not entry.is_orphan:
            continue
        description = f"{entry.folder} ({_format_size(entry.size)}) of {entry.name}"
        if remove_entry(entry):
            print(printable(f"removed {description}"))
        else:
            print(printable(f"kept, since a process is preparing it: {description}"))
    remove_files_of_other_code(cache_folder)


def _format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
