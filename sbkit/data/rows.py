"""The rows of a prepared corpus: clips of manifests and tables, with the location of their audio.

manifest -> joined with the clips in shards -> SPLIT.arrow -> Dataset
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import MemoryMappedTable

from sbkit.base.arrays import Bools
from sbkit.base.errors import ConfigError, DataError, concerning
from sbkit.base.files import temporary_path, to_json
from sbkit.base.messages import listed, printable
from sbkit.data.audio_tables import AudioTable
from sbkit.data.columns import CUT_SHORT
from sbkit.data.corpus import Corpus
from sbkit.data.filesystem import Storage
from sbkit.data.filters import filter_splits
from sbkit.data.manifest import (
    BLOCK_ROWS,
    CHANNEL_FAULT,
    DURATION_COLUMN,
    RESERVED_COLUMNS,
    STORED_COLUMN,
    Excluded,
    Manifest,
    are_distinct,
    hash_texts,
    parse_durations,
    take_rows,
)
from sbkit.data.shard import (
    AUDIO,
    AUDIO_TYPE,
    CLIP_KEYS,
    CLIP_TYPE,
    LAZY,
    UNREADABLE_AUDIO,
    ShardTable,
    read_shard_tables,
)
from sbkit.data.work_units import (
    NUM_DIGITS,
    RowBlocks,
    WorkUnit,
    clip_keys,
    join_keys,
    stat_files,
    unit_of,
)

FILES_NAME = "files"  # names the list of the files of all rows
MAX_UNUSABLE_SHARE = 0.05  # of a split's rows; a run with more is refused
STORED_SCHEMA = pa.schema({"samples": pa.int64(), CHANNEL_FAULT: pa.string(), AUDIO: AUDIO_TYPE})

Fault = tuple[str, str]  # the reason to exclude a clip, and the detail


@dataclass(frozen=True)
class PreparedSplit:
    """The rows of a split, as the corpus has them.

    dataset: the columns id, sentence, samples, other columns of the corpus, and audio, which
        `read_rows` reads.
    digest: changes with ids, sentences, lengths and audio, but not with the folders, times and
        names of files.
    filtered: counts of the rows that the run's filters leave out, by reason.
    """

    dataset: datasets.Dataset
    excluded: Sequence[Excluded]
    digest: str
    filtered: Mapping[str, int] = field(default_factory=dict)


# ---- blocks of rows


def read_row_blocks(corpus: Corpus, *, as_stream: bool = False) -> RowBlocks:
    """Return the manifests and tables of all splits, without the rows that filters leave out.

    as_stream: return iterators, which read each block when it is used.
    """
    names = [*chain.from_iterable(corpus.roles().values())]
    where = corpus.settings["where"]
    if as_stream and not where:
        return {name: corpus.blocks(name) for name in names}
    row_blocks = {name: [*corpus.blocks(name)] for name in names}
    if not where or has_tables(row_blocks):
        return row_blocks  # rows of tables are filtered once they are read
    manifests = {
        name: [i for i in items if isinstance(i, Manifest)] for name, items in row_blocks.items()
    }
    return filter_splits(manifests, where)


def has_tables(row_blocks: RowBlocks) -> bool:
    """Check whether any rows come from tables with audio."""
    items = chain.from_iterable(row_blocks.values())
    return any(isinstance(item, AudioTable) for item in items)


def manifests_of(row_blocks: RowBlocks) -> Iterator[Manifest]:
    """Yield the manifests of clips in files, not in a prepared corpus."""
    for item in chain.from_iterable(row_blocks.values()):
        if isinstance(item, Manifest) and not is_located(item):
            yield item


# ---- clips in shards


class Shards:
    """The shards of a corpus, and their names in its rows.

    template: a work unit without content, with the facts that all units share.
    names: of the shards, by unit.
    prefix: before these names in rows, such as the corpus's folder in the cache.
    is_numbered: whether rows have the number of their unit; epochs are then read in windows of
        shards.
    sizes: of audio files in bytes, as stated in the tables that were read.
    """

    def __init__(
        self,
        storage: Storage,
        template: WorkUnit,
        names: Mapping[str, Sequence[str]],
        *,
        prefix: str = "",
        is_numbered: bool = False,
    ) -> None:
        self.storage, self.template = storage, template
        self.sizes: dict[str, int] = {}
        self._names, self._prefix = names, prefix
        self._numbers = {name: i for i, name in enumerate(names, 1)} if is_numbered else {}

    def tables(self, units: Iterable[str] | None = None) -> Iterator[ShardTable]:
        """Yield the tables of units in order; by default, of all units."""
        units = self._names if units is None else units
        names = chain.from_iterable(self._names.get(unit, ()) for unit in units)
        for table in read_shard_tables(self.storage, names):
            self.sizes[f"{table.name}.clips"] = table.audio_bytes
            yield table

    def locate(self, shard: ShardTable) -> pa.Table:
        """Return the samples, mix_fault and audio of a shard's clips, as STORED_SCHEMA."""
        table = shard.stored
        count = len(table)
        audio = table[AUDIO].combine_chunks()
        shared = ("start", "size", "crc32", "digest", "file_rate")
        columns = {name: audio.field(name) for name in shared}
        columns["file"] = pa.repeat(f"{self._prefix}{shard.name}.clips", count)
        columns["shard"] = pa.repeat(self._numbers.get(unit_of(shard.name), 0), count)
        columns["sample_rate"] = pa.repeat(self.template.sample_rate, count)
        fields = list(AUDIO_TYPE)
        locations = pa.StructArray.from_arrays([columns[f.name] for f in fields], fields=fields)
        return pa.table(
            {"samples": table["samples"], CHANNEL_FAULT: table[CHANNEL_FAULT], AUDIO: locations}
        )


class StoredClips(NamedTuple):
    """The clips of files that are stored in shards, and the clips that cannot be decoded.

    keys: of the rows of `stored`, then of `faults`.
    stored: samples, mix_fault and audio, as STORED_SCHEMA.
    files: the present state of the files, as FILES_SCHEMA.
    """

    keys: pa.ChunkedArray
    stored: pa.Table
    faults: Sequence[Fault]
    files: pa.Table

    @classmethod
    def collect(cls, shards: Shards, units: Iterable[str] | None, files: pa.Table) -> "StoredClips":
        """Collect the clips of units whose files are unchanged.

        units: None for all.
        """
        clips = [pa.schema(list(CLIP_TYPE)).empty_table()]
        stored = [STORED_SCHEMA.empty_table()]
        left_out = [*clips]
        for shard in shards.tables(units):
            clips.append(pa.Table.from_struct_array(shard.stored[AUDIO]))
            stored.append(shards.locate(shard))
            left_out.append(pa.Table.from_struct_array(shard.left_out[AUDIO]))
        keys = pa.concat_tables(table.select(CLIP_KEYS) for table in (*clips, *left_out))
        is_current = are_current(files, keys)
        locations = pa.concat_tables(stored)
        faults = pa.concat_tables(left_out).filter(is_current[len(locations) :])
        return cls(
            join_keys(keys["path"], keys["part"]).filter(is_current),
            locations.filter(is_current[: len(locations)]),
            [*zip(faults["reason"].to_pylist(), faults["message"].to_pylist(), strict=True)],
            files,
        )

    def find(self, manifest: Manifest) -> pa.ChunkedArray:
        """Return the index of each clip in `keys`; null for a clip that is not there."""
        return pc.index_in(clip_keys(manifest), value_set=self.keys)

    def missing(self, item: Manifest | AudioTable) -> Manifest | AudioTable:
        """Return the clips that still have to be decoded, and whose files can be reached.

        A table with audio, and a manifest with locations, are returned as they are.
        """
        if isinstance(item, AudioTable) or is_located(item):
            return item
        manifest = item.filter(pc.is_null(self.find(item)).to_numpy())
        unreachable = self.files["path"].filter(pc.less(self.files["file_size"], 0))
        paths = manifest.rows[AUDIO].cast(pa.large_binary())
        is_unreachable = pc.is_in(paths, value_set=unreachable)
        return manifest.filter(~is_unreachable.to_numpy())

    def join(self, manifest: Manifest) -> Manifest:
        """Add the location of the audio; exclude the clips that have no audio."""
        indices = self.find(manifest)
        is_stored = pc.less(indices, len(self.stored)).fill_null(False)
        faults: list[Fault] = []
        is_lost = pc.invert(is_stored)
        for index, path in zip(
            indices.filter(is_lost).to_pylist(),
            manifest.rows[AUDIO].filter(is_lost).to_pylist(),
            strict=True,
        ):
            fault = f"{printable(os.fsdecode(path))} is missing, or cannot be read."
            missing = (UNREADABLE_AUDIO, fault)
            faults.append(missing if index is None else self.faults[index - len(self.stored)])
        stored = take_rows(self.stored, indices.filter(is_stored).to_numpy())
        return _add_locations(manifest, is_stored.to_numpy(), stored, faults)


def are_current(files: pa.Table, clips: pa.Table) -> pa.ChunkedArray:
    """Return whether the file of each clip still has the same size and time.

    files: the present state of the files, as FILES_SCHEMA.
    """
    present = files.take(pc.index_in(clips["path"], value_set=files["path"]))
    is_same = [pc.equal(present[name], clips[name]) for name in ("file_size", "file_time")]
    return pc.and_(*is_same).fill_null(False)


def _add_locations(
    manifest: Manifest, is_stored: Bools, stored: pa.Table, faults: Iterable[Fault]
) -> Manifest:
    """Add the locations of stored clips; exclude the other clips, with one fault for each."""
    stored_manifest = manifest.filter(is_stored)
    lost_ids = manifest.rows["id"].filter(pa.array(~is_stored)).to_pylist()
    excluded = [
        Excluded(id, reason, detail) for id, (reason, detail) in zip(lost_ids, faults, strict=True)
    ]
    rows = stored_manifest.rows.append_column(STORED_COLUMN, stored.to_struct_array())
    return replace(stored_manifest, rows=rows, excluded=(*manifest.excluded, *excluded))


# ---- writing


@dataclass(frozen=True)
class RowWriter:
    """Writes the rows of splits, with the location of their audio, and the list of their files.

    clips: the stored clips of files.
    folder: the target.
    ending: the end of the file names, before the suffix.
    files: blocks of the list of files, as FILES_SCHEMA.
    shard_names: the names of the shards of these rows.
    """

    shards: Shards
    clips: StoredClips
    folder: Path
    ending: str = ""
    files: list[pa.Table] = field(default_factory=list)
    shard_names: set[str] = field(default_factory=set)

    def write(self, corpus: Corpus, row_blocks: RowBlocks) -> dict[str, Any]:
        """Write the rows of all splits; return the facts about each, as plain data."""
        self.files.append(self.clips.files)
        located: Mapping[str, Iterable[Manifest]]
        located = {split: self._locate(split, items) for split, items in row_blocks.items()}
        if (where := corpus.settings["where"]) and has_tables(row_blocks):
            located = filter_splits(located, where)
        facts = {split: self._write_split(split, blocks) for split, blocks in located.items()}
        self._write_tables(FILES_NAME, iter(self.files))
        return facts

    def _locate(self, split: str, items: Iterable[Manifest | AudioTable]) -> Iterator[Manifest]:
        """Yield the rows of manifests and tables with the location of their audio."""
        for is_table, group in groupby(items, key=lambda item: isinstance(item, AudioTable)):
            if is_table:
                tables = [item for item in group if isinstance(item, AudioTable)]
                yield from self._rows_of_tables(split, tables)
                continue
            manifests = (item for item in group if isinstance(item, Manifest))
            for is_stored, blocks in groupby(manifests, key=is_located):
                if is_stored:
                    yield from blocks
                elif self.shards.template.store == LAZY:
                    yield from map(self._plan_lazy, blocks)
                else:
                    yield from self.clips.join(Manifest.join(blocks)).blocks()

    def _plan_lazy(self, block: Manifest) -> Manifest:
        files = stat_files(pc.unique(block.rows[AUDIO]))
        self.files.append(files)
        return plan_lazy(block, files, self.shards.template.sample_rate)

    def _rows_of_tables(self, split: str, tables: Sequence[AudioTable]) -> Iterator[Manifest]:
        """Yield the rows of tables with audio, shard by shard, all with the same columns."""
        template = self.shards.template
        units = [replace(template, split=split, table=table).name for table in tables]
        # Only the names of columns and the hashes of ids are kept in memory for all shards.
        schemas, hashes = [pa.schema([])], [np.empty(0, np.int64)]
        for shard in self.shards.tables(units):
            schemas.append(shard.table.schema)
            hashes.append(hash_texts(shard.stored["id"]))
        columns = pa.unify_schemas(schemas, promote_options="default").empty_table()
        names = [name for name in columns.column_names if name not in STORED_SCHEMA.names]
        columns = columns.select(names)
        seen: set[str] | None = None if are_distinct(hashes) else set()
        first_row = 0
        for shard in self.shards.tables(units):
            rows = pa.concat_tables([columns, shard.stored], promote_options="default")
            rows = rows.select(columns.column_names)
            if seen is not None:
                ids = _rename_repeated(rows["id"], seen, first_row)
                rows = rows.set_column(rows.column_names.index("id"), "id", ids)
            rows = rows.append_column(AUDIO, rows["id"].cast(pa.binary()))  # unique like a path
            rows = rows.append_column(STORED_COLUMN, self.shards.locate(shard).to_struct_array())
            left_out = pa.Table.from_struct_array(shard.left_out[AUDIO]).select(
                ("reason", "message")
            )
            excluded = zip(
                shard.left_out["id"].to_pylist(), *left_out.to_pydict().values(), strict=True
            )
            yield Manifest(rows, tuple(Excluded(*row) for row in excluded))
            first_row += len(rows)

    def _write_split(self, split: str, blocks: Iterable[Manifest]) -> dict[str, Any]:
        """Write the rows of a split; raises DataError if too many are unusable."""
        excluded: list[Excluded] = []
        filtered = Counter[str]()
        num_rows = 0
        digest = hashlib.sha256()  # of ids, sentences, lengths and audio
        fingerprint = hashlib.sha256()  # of all columns
        blocks = iter(blocks)
        first = next(blocks, Manifest.join([]))

        def rows_to_write() -> Iterator[pa.Table]:
            nonlocal num_rows
            for block in chain([first], blocks):
                num_rows += len(block)
                excluded.extend(replace(row, split=split) for row in block.excluded)
                filtered.update(block.filtered)
                table = _rows_to_write(block)
                _update_hashes(digest, fingerprint, table)
                names = pc.unique(pc.struct_field(table[AUDIO], "file")).to_pylist()
                self.shard_names.update(name.rpartition("/")[2] for name in names)
                yield table

        self._write_tables(split, rows_to_write())
        check_loss(split, excluded, num_rows + len(excluded))
        return {
            "rows": num_rows,
            "digest": digest.hexdigest(),
            "fingerprint": fingerprint.hexdigest()[:NUM_DIGITS],
            "excluded": [asdict(row) for row in excluded],
            "filtered": dict(filtered),
        }

    def _write_tables(self, name: str, tables: Iterator[pa.Table]) -> None:
        """Write one or more tables into a file; a column that some lack is null in their rows."""
        file = self.folder / f"{name}{self.ending}.arrow"
        parts = [
            write_part(temporary_path(file), part)
            for _, part in groupby(tables, key=lambda table: table.schema)
        ]
        if len(parts) > 1:
            mapped = (MemoryMappedTable.from_file(str(part)).table for part in parts)
            rows = pa.concat_tables(mapped, promote_options="default")
            starts = range(0, max(1, len(rows)), BLOCK_ROWS)
            blocks = (rows.slice(start, BLOCK_ROWS) for start in starts)
            parts = [write_part(temporary_path(file), blocks), *parts]
        parts[0].replace(file)
        for part in parts[1:]:
            part.unlink()


def write_rows(file: Path, rows: pa.Table) -> dict[str, Any]:
    """Write the rows of a split again; return the facts that change with them."""
    digest, fingerprint = hashlib.sha256(), hashlib.sha256()
    _update_hashes(digest, fingerprint, rows)
    write_part(file, [rows])
    fingerprints = (digest.hexdigest(), fingerprint.hexdigest()[:NUM_DIGITS])
    return dict(zip(("rows", "digest", "fingerprint"), (len(rows), *fingerprints), strict=True))


def write_part(file: Path, tables: Iterable[pa.Table]) -> Path:
    """Write tables of one schema."""
    tables = iter(tables)
    first = next(tables)
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table.combine_chunks())  # otherwise empty chunks are written
    return file


def _rows_to_write(block: Manifest) -> pa.Table:
    """Return the rows of a block, which has locations, as they are written."""
    rows = block.rows
    if STORED_COLUMN not in rows.column_names:  # a split without any row
        rows = rows.append_column(STORED_COLUMN, pa.array([], pa.struct(list(STORED_SCHEMA))))
    stored = pa.Table.from_struct_array(rows[STORED_COLUMN])
    return pa.table(
        {name: rows[name] for name in ("id", "sentence")}
        | {name: stored[name] for name in ("samples", CHANNEL_FAULT)}
        | {name: rows[name] for name in rows.column_names if name not in RESERVED_COLUMNS}
        | {AUDIO: stored[AUDIO]}
    )


def _update_hashes(digest: "hashlib._Hash", fingerprint: "hashlib._Hash", rows: pa.Table) -> None:
    """Add rows to the hash of the data that a run learns from, and to the hash of all columns."""
    audio = pa.Table.from_struct_array(rows[AUDIO])
    # The plan of an epoch depends on the number of the unit.
    shards = pc.if_else(pc.equal(audio["shard"], 0), "", audio["shard"].cast(pa.string()))
    samples = rows["samples"].cast(pa.string())
    learned_columns = (rows["id"], rows["sentence"], samples, audio["digest"], shards)
    _update_hash(digest, learned_columns)
    names = [name for name in rows.column_names if name not in RESERVED_COLUMNS]
    fingerprint.update(to_json(names).encode())
    # The digest of lazy audio is a size, which two files may share.
    files = pc.if_else(audio["start"].is_null(), audio["file"], "")
    other_columns = (
        rows[name].cast(pa.string()).fill_null("\1") for name in names
    )  # "" is a value
    _update_hash(fingerprint, [*learned_columns, files, *other_columns])


def _update_hash(hash: "hashlib._Hash", columns: Sequence[pa.ChunkedArray]) -> None:
    lines = pc.binary_join_element_wise(*columns, "\0", null_handling="replace").to_pylist()
    hash.update("".join(f"{line}\n" for line in lines).encode())


def map_rows(file: Path, num_rows: int) -> MemoryMappedTable:
    """Map the rows of a split; raises OSError or ValueError if they are missing or damaged."""
    table = MemoryMappedTable.from_file(str(file))
    if len(table) != num_rows:
        raise ValueError(f"it has {len(table)} rows instead of {num_rows}")
    return table


def is_located(manifest: Manifest) -> bool:
    """Return whether the rows of a manifest have the location of audio in a prepared corpus."""
    return STORED_COLUMN in manifest.rows.column_names


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise DataError if more than `MAX_UNUSABLE_SHARE` of ``total`` rows is unusable."""
    lost = [row for row in lost if row.reason != CUT_SHORT]  # only the end of such a clip is lost
    if len(lost) <= MAX_UNUSABLE_SHARE * total:
        return
    reasons = Counter(row.reason for row in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    examples = "; ".join(f"{row.id}: {row.detail}" for row in lost[:3])
    raise DataError(
        f"{len(lost)} of {total} rows of {split} are unusable ({counts}), but at most "
        f"{MAX_UNUSABLE_SHARE:.0%} may be. The first ones: {examples}"
    )


def _rename_repeated(ids: pa.ChunkedArray, seen: set[str], first_row: int) -> pa.ChunkedArray:
    """Append the row number to repeated ids: several tables may have clips of the same name."""
    names: list[str] = []
    for row, id in enumerate(ids.to_pylist(), start=first_row):
        names.append(f"{id}-{row}" if id in seen else id)
        seen.add(id)
    return pa.chunked_array([pa.array(names, pa.string())])


# ---- lazy audio


@concerning("audio_store")
def plan_lazy(manifest: Manifest, files: pa.Table, sample_rate: int) -> Manifest:
    """Add locations, as `StoredClips.join` does, to clips that are decoded when they are read.

    Their lengths are the durations that the corpus states.
    """
    if manifest.has_spans:
        raise ConfigError(
            "`audio_store: lazy` decodes whole files, but some clips are spans or channels of "
            "files. Set `audio_store: flac`."
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
    paths = rows[AUDIO].cast(pa.large_binary())
    file_sizes = files["file_size"].take(pc.index_in(paths, value_set=files["path"])).to_numpy()
    faults: dict[int, Fault] = {}
    for row, path in enumerate(manifest.paths):
        if file_sizes[row] < 0 or path.encode(errors="ignore").decode() != path:
            fault = f"{printable(path)} is missing, cannot be read, or its name is not UTF-8."
            faults[row] = (UNREADABLE_AUDIO, fault)
        elif is_empty[row]:
            faults[row] = (UNREADABLE_AUDIO, f"The corpus states 0 ms for {path}.")
    is_readable = np.ones(len(rows), bool)
    is_readable[[*faults]] = False
    count = int(is_readable.sum())
    samples = pa.array(np.rint(seconds[is_readable] * sample_rate).astype(np.int64))
    sizes = pa.array(file_sizes[is_readable].astype(np.int64))
    facts = (sizes.cast(pa.string()), samples.cast(pa.string()))
    audio = {
        "file": rows[AUDIO].filter(pa.array(is_readable)).cast(pa.string()),
        "shard": pa.repeat(0, count),
        "start": pa.nulls(count, pa.int64()),
        "size": sizes,
        "crc32": pa.nulls(count, pa.int64()),
        "sample_rate": pa.repeat(sample_rate, count),
        "digest": pc.binary_join_element_wise(facts[0], " bytes, ", facts[1], " samples", ""),
        "file_rate": pa.nulls(count, pa.int64()),
    }
    stored = {
        "samples": samples,
        CHANNEL_FAULT: pa.repeat("", count),
        AUDIO: pa.table(audio, pa.schema(list(AUDIO_TYPE))).to_struct_array(),
    }
    return _add_locations(manifest, is_readable, pa.table(stored), faults.values())
