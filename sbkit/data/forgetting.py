"""Forget clips: erase from prepared corpora what no table lists any more, or what the user names.

A shard with such a clip is written anew: its table without the clip, its audio with zeros in place
of the clip. So the other clips keep their positions, and a run that reads them goes on. The rows
with the clip and the facts about them are removed; the next start writes the other rows again.
"""

import html
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.table import MemoryMappedTable

from sbkit.base.checksums import checksum
from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    TEMPORARY_NAMES,
    fsync_path,
    remove,
    remove_abandoned,
    task_lock,
    to_json,
    write_bytes_atomically,
)
from sbkit.base.messages import plural, printable
from sbkit.base.user_folders import cache_folder, make_cache_folder
from sbkit.data.audio_tables import AudioTable
from sbkit.data.cache import (
    ARCHIVES_FOLDER,
    CORPORA_FOLDER,
    CORPUS_FILE,
    ENCODING,
    ROWS_VERSION,
    corpus_version,
    list_entries,
    prune_orphans,
    read_record,
    sources_of,
)
from sbkit.data.corpus import corpus_of
from sbkit.data.facts import FACTS_FOLDER
from sbkit.data.filesystem import Storage
from sbkit.data.manifest import Manifest
from sbkit.data.prepared import CorpusRecord, DataSettings, split_fingerprint, unit_template
from sbkit.data.read_manifests import TABLE_PATTERN, choose_files, find_files, read_files
from sbkit.data.rows import FILES_NAME, map_rows, write_part, write_rows
from sbkit.data.shard import (
    AUDIO,
    CLIP_TYPE,
    FORGOTTEN,
    ShardTable,
    read_shard_tables,
    write_shard_table,
)
from sbkit.data.tables import TableOptions
from sbkit.data.work_units import KEY_SEPARATOR, clip_keys, join_keys, unit_of

FORGOTTEN_FILE = "forgotten.txt"  # in the cache: the fingerprints of splits with forgotten clips
WEIGHT_SUFFIXES = (".ckpt", ".safetensors", ".onnx")  # of files without ids and sentences
MIN_SENTENCE_WORDS = 4  # others are often spoken by several people
NO_BYTES, NO_TEXTS = pa.array([], pa.large_binary()), pa.array([], pa.string())

Keep = Callable[[ShardTable], pa.ChunkedArray]  # whether each clip of a shard is kept


# ---- rows and shards


@dataclass(frozen=True)
class _Rows:
    """The rows that a run has prepared in a folder of the cache.

    file: the record, rows-KEYS.json.
    """

    file: Path
    record: CorpusRecord

    @classmethod
    def find(cls, folder: Path) -> Iterator["_Rows"]:
        """Yield the rows in a folder, the newest first."""
        for file in sorted(folder.glob("rows-*.json"), key=lambda f: f.stat().st_mtime)[::-1]:
            with suppress(ValueError):
                yield cls(file, CorpusRecord.parse(file.read_bytes()))

    @property
    def folder(self) -> Path:
        return self.file.parent

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{self.file.stem.removeprefix('rows')}.arrow"

    @cached_property
    def table(self) -> pa.Table | None:
        """The columns id, sentence and audio of all splits; None if rows were removed."""
        tables: list[pa.Table] = []
        with suppress(OSError, ValueError):
            for name, facts in self.record.splits.items():
                rows = map_rows(self._path(name), facts["rows"]).table
                tables.append(rows.select(["id", "sentence", AUDIO]))
            return pa.concat_tables(tables, promote_options="default")
        return None

    @cached_property
    def locations(self) -> pa.ChunkedArray:
        """The locations of their clips; without rows, those of all clips in the folder."""
        if self.table is not None:
            return _locations_of(self.table)
        return _locations_in(self.folder)

    @cached_property
    def files(self) -> pa.ChunkedArray:
        """The paths of all audio files that its tables listed."""
        with suppress(OSError, ValueError):
            return MemoryMappedTable.from_file(str(self._path(FILES_NAME))).table["path"]
        return pa.chunked_array([NO_BYTES])

    def fingerprints(self) -> Iterator[str]:
        """Yield the fingerprints by which runs know these rows."""
        for role, names in self.record.roles.items():
            for index, name in enumerate(names):
                yield split_fingerprint(self.record.splits[name]["digest"], role, index)

    def remove(self) -> None:
        """Remove the rows and facts; the record stays, as a later `prune` reads its tables."""
        times = self.file.stat()
        splits = {name: {**facts, "excluded": []} for name, facts in self.record.splits.items()}
        record = to_json(asdict(replace(self.record, splits=splits)))
        write_bytes_atomically(self.file, record.encode(**ENCODING))
        os.utime(self.file, ns=(times.st_atime_ns, times.st_mtime_ns))
        for path in (*map(self._path, (*splits, FILES_NAME)), self.folder / FACTS_FOLDER):
            remove(path)


def _locations_of(rows: pa.Table) -> pa.ChunkedArray:
    """Return the name of the shard and the start of each row's clip; null for a lazy clip."""
    if AUDIO not in rows.column_names:
        return pa.chunked_array([NO_TEXTS])
    names = pc.replace_substring_regex(pc.struct_field(rows[AUDIO], "file"), r"^.*/", "")
    return _join_locations(names, pc.struct_field(rows[AUDIO], "start"))


def _join_locations(names: pa.ChunkedArray, starts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(names, starts.cast(pa.string()), " ")


def _read_shards(storage: Storage) -> Iterator[ShardTable]:
    names = [name.removesuffix(".parquet") for name in storage.find("", ".parquet")]
    yield from read_shard_tables(storage, sorted(names))


def _locations_in(folder: Path) -> pa.ChunkedArray:
    locations = (_clips_of(shard)[2].chunks for shard in _read_shards(Storage(folder)))
    return pa.chunked_array([NO_TEXTS, *chain.from_iterable(locations)])


def _clips_of(shard: ShardTable) -> tuple[pa.ChunkedArray, pa.ChunkedArray, pa.ChunkedArray]:
    """Return the path, the key and the location of each clip of a shard."""
    clips = pa.Table.from_struct_array(shard.table[AUDIO])
    names = pa.chunked_array([pa.repeat(f"{shard.name}.clips", len(clips))])
    paths = clips["path"]
    return paths, join_keys(paths, clips["part"]), _join_locations(names, clips["start"])


def _corpora(cache: Path) -> list[Path]:
    """Return the folders of prepared corpora, but not of other versions of sbkit."""
    folders = [entry.folder for entry in list_entries(cache)]
    return [folder for folder in folders if corpus_version(folder) == ROWS_VERSION]


@dataclass
class _Eraser:
    """Finds the clips of folders that are not kept, and erases them.

    keep: decides which clips of a shard are kept.
    found: by the URL of a folder, its shards with other clips, and which clips are kept.
    counts: of the clips that are not kept, by the URL of a folder.
    locations: of these clips.
    rewritten: the new file of each shard by the device and inode of the old one, for its links.
    """

    keep: Keep
    found: dict[str, list[tuple[ShardTable, pa.ChunkedArray]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    locations: list[pa.Array] = field(default_factory=lambda: [NO_TEXTS])
    rewritten: dict[tuple[int, int], Path] = field(default_factory=dict)

    def find(self, storage: Storage) -> None:
        """Find the clips in a folder."""
        found = self.found.setdefault(storage.url, [])
        for shard in _read_shards(storage):
            is_kept = self.keep(shard).fill_null(False)
            reasons = pc.struct_field(shard.table[AUDIO], "reason").fill_null("")
            is_found = pc.and_(pc.invert(is_kept), pc.not_equal(reasons, FORGOTTEN))
            if count := pc.sum(is_found).as_py():
                self.counts[storage.url] += count
                found.append((shard, is_kept))
                self.locations += _clips_of(shard)[2].filter(is_found).drop_null().chunks

    def has_found(self, locations: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return whether each location is that of a clip that `find` has found."""
        return pc.is_in(locations, value_set=pa.chunked_array(self.locations))

    def erase(self, storage: Storage, *, removes_shards: bool) -> None:
        """Write the shards of a folder anew; remove audio without a table, which nobody can read.

        removes_shards: whether a shard without other clips is removed.
        """
        for shard, is_kept in self.found.get(storage.url, ()):
            kept = shard.table.filter(is_kept)
            if removes_shards and not (len(kept) and storage.find(shard.name, ".clips")):
                storage.remove(f"{shard.name}.parquet")
                continue
            self._write_anew(storage, shard, ShardTable(shard.name, kept))
        tables = {name.removesuffix(".parquet") for name in storage.find("", ".parquet")}
        for name in storage.find("", ".clips"):
            if name.removesuffix(".clips") not in tables:
                storage.remove(name)

    def _write_anew(self, storage: Storage, shard: ShardTable, kept: ShardTable) -> None:
        """Write the audio, then the table, so that a repetition ends what was interrupted."""
        name, size = f"{shard.name}.clips", shard.audio_bytes
        prefix, _, suffix = TEMPORARY_NAMES.partition("*")
        with TemporaryDirectory(suffix, prefix, storage.folder) as scratch:
            old = storage.fetch(name, Path(scratch))
            new = Path(scratch, "new")
            inode = (old.stat().st_dev, old.stat().st_ino)
            if storage.folder is not None and inode in self.rewritten:
                new.hardlink_to(self.rewritten[inode])
            else:
                with old.open("rb") as source, new.open("wb") as target:
                    for clip in kept.stored[AUDIO].to_pylist():
                        source.seek(clip["start"])
                        target.seek(clip["start"])
                        target.write(source.read(clip["size"]))
                    target.truncate(size)
                fsync_path(new)
            storage.move_in(new, name)
        if storage.folder is not None:
            self.rewritten[inode] = storage.folder / name
        gap = {"size": size - kept.audio_bytes, "reason": FORGOTTEN}
        rows = [kept.table, pa.table({AUDIO: pa.array([gap], CLIP_TYPE)})]
        table = pa.concat_tables(rows, promote_options="default")
        write_shard_table(storage, ShardTable(shard.name, table))


def _remove_rows(doomed: Sequence[_Rows], eraser: _Eraser) -> None:
    """Remove rows and facts; note those with clips that were found."""
    for rows in doomed:
        if pc.any(eraser.has_found(rows.locations)).as_py():
            _note_forgotten(rows.fingerprints())
        rows.remove()


def _note_forgotten(fingerprints: Iterable[str]) -> None:
    with (make_cache_folder() / FORGOTTEN_FILE).open("a") as file:
        file.writelines(f"{fingerprint}\n" for fingerprint in fingerprints)


def find_forgotten(fingerprints: Mapping[str, str]) -> list[str]:
    """Return the splits whose fingerprints are those of data with forgotten clips.

    fingerprints: of splits, perhaps only their first digits.
    """
    with suppress(FileNotFoundError):
        lines = (cache_folder() / FORGOTTEN_FILE).read_text().split()
        return [
            split
            for split, digits in fingerprints.items()
            if any(line.startswith(digits) for line in lines)
        ]
    return []


def _erase_in_cache(eraser: _Eraser, folder: Path, doomed: Sequence[_Rows], action: str) -> None:
    """Erase what was found in a folder of the cache, and remove the doomed rows there."""
    if doomed or eraser.counts[str(folder)]:
        print(_describe(action, eraser, str(folder)))
    _remove_rows(doomed, eraser)
    for path in (*folder.glob(TEMPORARY_NAMES), *folder.glob("*.arrow")):
        # The lock is held, so others are left from killed processes, and from `--again`.
        if not (folder / f"rows-{path.stem.rpartition('-')[2]}.json").is_file():
            remove(path)
    eraser.erase(Storage(folder), removes_shards=True)


def _describe(action: str, eraser: _Eraser, place: str) -> str:
    return printable(f"{action} {plural(eraser.counts[place], 'clip')}, and their rows, in {place}")


# ---- what no table lists any more


@dataclass
class _Listing:
    """What the tables of the user list.

    keys: of clips, as `clip_keys` returns them.
    files: the paths of audio files.
    locations: of clips in shards, for tables that cannot be read.
    units: the names of the units of tables with audio.
    """

    keys: list[pa.Array] = field(default_factory=lambda: [NO_BYTES])
    files: list[pa.Array] = field(default_factory=lambda: [NO_BYTES])
    locations: list[pa.Array] = field(default_factory=lambda: [NO_TEXTS])
    units: set[str] = field(default_factory=set)

    def add_locations(self, locations: pa.ChunkedArray) -> None:
        locations = locations.drop_null()
        self.locations += locations.chunks
        names = pc.unique(pc.replace_substring_regex(locations, r"\.clips .*", ""))
        self.units.update(map(unit_of, names.to_pylist()))

    def add_manifest(self, manifest: Manifest) -> None:
        self.keys += clip_keys(manifest).chunks
        self.files += manifest.rows[AUDIO].cast(pa.large_binary()).chunks

    def add(self, other: "_Listing") -> None:
        self.keys += other.keys
        self.files += other.files
        self.units |= other.units

    def keep(self, shard: ShardTable) -> pa.ChunkedArray:
        """Return whether each clip of a shard is listed; a table with audio lists all its rows."""
        _, keys, locations = _clips_of(shard)
        if "id" in shard.table.column_names:
            is_listed = unit_of(shard.name) in self.units
            return pa.chunked_array([pa.repeat(is_listed, len(keys))])
        return pc.or_(
            pc.is_in(keys, value_set=pa.chunked_array(self.keys)),
            pc.is_in(locations, value_set=pa.chunked_array(self.locations)),
        )

    def lists_all(self, files: pa.ChunkedArray) -> bool:
        return pc.all(self._lists(files)).as_py() is not False

    def lists_any(self, files: pa.ChunkedArray) -> bool:
        return pc.any(self._lists(files)).as_py() is True

    def _lists(self, files: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.is_in(files.cast(pa.large_binary()), value_set=pa.chunked_array(self.files))


def prune(cache: Path) -> None:
    """Remove the folders that nothing needs, and erase the clips that no table lists any more."""
    orphans = {entry.folder for entry in list_entries(cache) if entry.is_orphan}
    folders = _corpora(cache)
    listing = _Listing()
    outdated: set[Path] = set()  # records of tables that have changed
    for folder in folders:
        all_rows = [*_Rows.find(folder)] if folder not in orphans else []
        is_known = all_rows and len(all_rows) == len([*folder.glob("rows-*.json")])
        if folder not in orphans and not is_known:  # its preparation was interrupted
            listing.add_locations(_locations_in(folder))
        settings_seen: set[str] = set()
        for rows in all_rows:
            settings = to_json(rows.record.settings)
            if _add_tables(rows, listing, is_newest=settings not in settings_seen):
                outdated.add(rows.file)
            settings_seen.add(settings)
    eraser = _Eraser(listing.keep)
    for folder in folders:
        eraser.find(Storage(folder))
    for folder in folders:
        doomed = [
            rows
            for rows in _Rows.find(folder)
            if rows.table is not None
            and (
                rows.file in outdated
                or pc.any(eraser.has_found(rows.locations)).as_py()
                or not listing.lists_all(rows.files)
            )
        ]
        with task_lock(folder.parent, folder.name, wait=False) as is_free:
            if is_free and folder in orphans:
                _remove_rows(doomed, eraser)
            elif is_free:
                _erase_in_cache(eraser, folder, doomed, "erasing")
            elif folder not in orphans:
                print(printable(f"kept, since it is being prepared: {folder}"))
    prune_orphans(cache)
    if (archives := cache / ARCHIVES_FOLDER).is_dir():
        remove_abandoned(archives)


def _add_tables(rows: _Rows, listing: _Listing, *, is_newest: bool) -> bool:
    """List the clips of the tables of prepared rows; return whether the rows are outdated.

    Tables that cannot be read list what they listed before, in the newest of their rows.
    """
    made_from = read_record(rows.folder)
    sources = sources_of(rows.folder)
    # Code of the user's is not run, and no address is opened, to prune a cache.
    is_readable = sources and not made_from.get("modules") and "://" not in "".join(sources)
    settings = {**rows.record.settings, "where": None}
    blocks: list[tuple[str, Manifest | AudioTable]] = []
    state: object = None  # unknown for a corpus without `files`
    if is_readable:
        try:
            corpus = corpus_of(DataSettings(settings))
            state = json.loads(json.dumps(corpus.state()))
            for split, facts in rows.record.splits.items():
                items = [*corpus.blocks(split)]
                is_empty = not any(isinstance(i, AudioTable) or len(i) for i in items)
                is_readable = is_readable and not (is_empty and facts["rows"])
                blocks += [(split, item) for item in items]
        except (SbkitError, OSError):
            is_readable = False
    listed = _Listing()
    for split, item in blocks:
        if isinstance(item, Manifest):
            listed.add_manifest(item)
        else:
            listed.units.add(replace(unit_template(settings), split=split, table=item).name)
    # Paths may depend on which files are there: on a disk that is not mounted, none is.
    is_readable = is_readable and (not len(rows.files) or listed.lists_any(rows.files))
    if is_readable:
        listing.add(listed)
    is_same = state is not None and state == made_from["tables"]
    if is_newest and (is_same or not is_readable):
        listing.add_locations(rows.locations)
        listing.files += rows.files.cast(pa.large_binary()).chunks
    return bool(is_readable) and state is not None and not is_same


# ---- what the user names


@dataclass
class _Named:
    """The clips that the user names.

    paths: of audio files with all their clips, and of tables with audio.
    keys: of spans of files, as `clip_keys` returns them.
    ids, sentences: of the clips.
    """

    paths: set[bytes] = field(default_factory=set)
    keys: set[bytes] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    sentences: set[str] = field(default_factory=set)

    def add(self, source: str, options: TableOptions) -> None:
        """Add the clips of a table, or an audio file, which need not exist any more."""
        if "://" not in source:
            source = str(Path(source).expanduser().absolute())
        if not TABLE_PATTERN.search(source):
            self.paths.add(os.fsencode(source))
            self.ids.add(Path(source).stem)
            return
        files = [(file, options) for file in choose_files(find_files(source))]
        for item in read_files(files):
            if isinstance(item, AudioTable):
                self.paths.add(os.fsencode(item.file))
                continue
            for key in clip_keys(item).to_pylist():
                (self.keys if KEY_SEPARATOR in key else self.paths).add(key)
            self.add_rows(item.ids, item.sentences)

    def add_rows(self, ids: Iterable[str], sentences: Iterable[str]) -> None:
        self.ids.update(ids)
        self.sentences.update(s for s in sentences if len(s.split()) >= MIN_SENTENCE_WORDS)

    def keep(self, shard: ShardTable) -> pa.ChunkedArray:
        """Return whether each clip of a shard is not named."""
        paths, keys, _ = _clips_of(shard)
        if "id" in shard.table.column_names:  # the path of a clip is TABLE::ROW/NAME
            tables = [path and path.partition(b"::")[0] for path in paths.to_pylist()]
            paths = pa.chunked_array([pa.array(tables, pa.large_binary())])
        in_keys = pc.is_in(keys, value_set=pa.array(self.keys, pa.large_binary()))
        return pc.invert(pc.or_(self.has(paths), in_keys))

    def has(self, files: pa.ChunkedArray) -> pa.ChunkedArray:
        value_set = pa.array(self.paths, pa.large_binary())
        return pc.is_in(files.cast(pa.large_binary()), value_set=value_set)


def forget(
    sources: Sequence[str],
    *,
    options: TableOptions,
    outs: Sequence[str],
    runs: Sequence[Path],
    dry_run: bool,
) -> None:
    """Erase clips from the prepared corpora of the cache, and list what runs hold of them.

    sources: tables of clips, and audio files.
    outs: corpora of `sbkit prepare --out`, from which they are erased, too.
    runs: folders with runs, scores and reports.
    """
    named = _Named()
    for source in sources:
        named.add(source, options)
    action = "would erase" if dry_run else "erasing"
    eraser = _Eraser(named.keep)
    storages = [*map(Storage, outs)]
    folders = _corpora(cache_folder())
    for storage in storages:
        eraser.find(storage)
        print(_describe(action, eraser, storage.url))
    for folder in folders:
        eraser.find(Storage(folder))
    for storage in storages:
        _rewrite_rows(storage, eraser, named, dry_run=dry_run)
        if not dry_run:
            eraser.erase(storage, removes_shards=False)
    for folder in folders:
        doomed: list[_Rows] = []
        for rows in _Rows.find(folder):
            if rows.table is None:
                continue
            is_found = eraser.has_found(rows.locations)
            if pc.any(is_found).as_py() or pc.any(named.has(rows.files)).as_py():
                doomed.append(rows)
                _add_found(named, rows.table, is_found)
        if dry_run:
            if doomed or eraser.counts[str(folder)]:
                print(_describe(action, eraser, str(folder)))
            continue
        with task_lock(folder.parent, folder.name, wait=True):
            _erase_in_cache(eraser, folder, doomed, action)
    for folder in {*(cache_folder() / CORPORA_FOLDER).glob("rows-*")} - {*folders}:
        tables = map(pq.read_table, folder.glob("*.parquet"))
        texts = chain.from_iterable(
            (column for column in table.columns if column.type == pa.string()) for table in tables
        )
        if any(pc.any(named.has(column)).as_py() for column in texts):
            print(printable(f"{action} the rows that Python gave, in {folder}"))
            if not dry_run:
                remove(folder)
    if not eraser.counts:
        print("No prepared corpus here has audio of these clips.")
    _print_traces(named, runs)


def _add_found(named: _Named, rows: pa.Table, is_found: pa.ChunkedArray) -> None:
    """Add the ids and sentences of rows, some of which were found, to those that are named."""
    if AUDIO in rows.column_names:
        files = pc.struct_field(rows[AUDIO], "file").cast(pa.large_binary())
        rows = rows.filter(pc.or_(is_found.fill_null(False), named.has(files)))
        named.add_rows(rows["id"].to_pylist(), rows["sentence"].to_pylist())


def _rewrite_rows(storage: Storage, eraser: _Eraser, named: _Named, *, dry_run: bool) -> None:
    """Write the rows and the index of `--out` without the clips that were found."""
    if storage.sizes([CORPUS_FILE]) == [None]:  # half written
        return
    record = CorpusRecord.parse(storage.read(CORPUS_FILE))
    rows_of_out = _Rows(Path(CORPUS_FILE), record)
    fingerprints = [*rows_of_out.fingerprints()]
    is_changed = False
    splits: dict[str, Mapping[str, object]] = {}
    with TemporaryDirectory(dir=None if dry_run else storage.folder) as scratch:
        for split, facts in record.splits.items():
            rows = map_rows(storage.fetch(f"{split}.arrow", Path(scratch)), facts["rows"]).table
            is_found = eraser.has_found(_locations_of(rows))
            _add_found(named, rows, is_found)
            excluded = [row for row in facts["excluded"] if not _names(row, named)]
            kept = rows.filter(pc.invert(is_found))
            is_changed |= len(kept) < len(rows) or len(excluded) < len(facts["excluded"])
            digests = write_rows(Path(scratch, f"new-{split}"), kept)
            sha256 = checksum(Path(scratch, f"new-{split}"))
            splits[split] = {**facts, **digests, "excluded": excluded, "sha256": sha256}
        if dry_run or not is_changed:
            return
        for split in splits:
            storage.move_in(Path(scratch, f"new-{split}"), f"{split}.arrow")
        files = MemoryMappedTable.from_file(
            str(storage.fetch(f"{FILES_NAME}.arrow", Path(scratch)))
        ).table
        write_part(Path(scratch, "new"), [files.filter(pc.invert(named.has(files["path"])))])
        storage.move_in(Path(scratch, "new"), f"{FILES_NAME}.arrow")
    record = replace(record, splits=splits)
    storage.write(CORPUS_FILE, to_json(asdict(record)).encode(**ENCODING))
    _note_forgotten(fingerprints)
    if storage.folder is not None:
        shutil.rmtree(storage.folder / FACTS_FOLDER, ignore_errors=True)


def _names(excluded: Mapping[str, str], named: _Named) -> bool:
    """Return whether an excluded row names a clip or an audio file."""
    paths = map(os.fsdecode, named.paths)
    return excluded["id"] in named.ids or any(path in excluded["detail"] for path in paths)


# ---- what runs hold


def _print_traces(named: _Named, folders: Sequence[Path]) -> None:
    """List the files below folders that have an id or a sentence of the clips."""
    texts = {form.encode() for text in named.sentences for form in (text, html.escape(text))}
    ids = [*map(os.fsencode, named.ids)]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    if found := [file for file in files if _has_any(file, ids, texts)]:
        print("These files have names or texts of the clips:")
        for file in found:
            print(printable(str(file)))


def _has_any(file: Path, ids: Iterable[bytes], texts: Iterable[bytes]) -> bool:
    if file.suffix in WEIGHT_SUFFIXES or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        return any(content.find(text) >= 0 for text in texts) or any(
            content.find(id) >= 0 and re.search(rb"(?<!\w)" + re.escape(id) + rb"(?!\w)", content)
            for id in ids
        )
