"""The rows of a prepared corpus: clips of manifests and tables, with the place of their audio.

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

from sbkit.audio.containers import AudioError
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import temporary_path, to_json
from sbkit.base.messages import listed, printable
from sbkit.data.audio_tables import AudioTable
from sbkit.data.columns import CUT_SHORT
from sbkit.data.corpus import Corpus
from sbkit.data.filesystem import Storage
from sbkit.data.filters import filter_splits
from sbkit.data.manifest import (
    DURATION_COLUMN,
    MIX_FAULT,
    RESERVED_COLUMNS,
    STORED,
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
    CLIP_TYPE,
    LAZY,
    ShardTable,
    locations_of,
    read_shard_tables,
)
from sbkit.data.units import (
    KEY_SEPARATOR,
    NUM_DIGITS,
    Sources,
    Work,
    clip_keys,
    join_keys,
    reason_of,
    stat_files,
    unit_of,
)

MAX_UNUSABLE_SHARE = 0.05  # of a split's rows; with more, the run is refused
STORED_SCHEMA = pa.schema({"samples": pa.int64(), MIX_FAULT: pa.string(), AUDIO: AUDIO_TYPE})


@dataclass(frozen=True)
class PreparedSplit:
    """The rows of a split, as the corpus has them.

    dataset: the columns id, sentence, samples, the corpus's others, and audio, which `read_rows`
        reads.
    digest: changes if ids, sentences, lengths or audio do, not with the places, times or names of
        files.
    filtered: counts of the rows that the run's filters leave out, by reason.
    """

    dataset: datasets.Dataset
    excluded: Sequence[Excluded]
    digest: str
    filtered: Mapping[str, int] = field(default_factory=dict)


# Sources


def read_sources(corpus: Corpus, *, as_stream: bool = False) -> Sources:
    """Return the manifests and tables of all splits, without the rows that filters leave out.

    as_stream: read them block by block, once, while they are used.
    """
    names = [*chain.from_iterable(corpus.roles().values())]
    where = corpus.settings.get("where")
    if as_stream and not where:
        return {name: corpus.blocks(name) for name in names}
    sources = {name: [*corpus.blocks(name)] for name in names}
    if not where or has_tables(sources):
        return sources  # rows of tables are filtered once they are read
    manifests = {
        name: [i for i in items if isinstance(i, Manifest)] for name, items in sources.items()
    }
    return filter_splits(manifests, where)


def has_tables(sources: Sources) -> bool:
    """Check whether any rows lie in tables with their audio."""
    items = chain.from_iterable(sources.values())
    return any(isinstance(item, AudioTable) for item in items)


def manifests_of(sources: Sources) -> Iterator[Manifest]:
    """Yield the manifests of clips in files."""
    for item in chain.from_iterable(sources.values()):
        if isinstance(item, Manifest) and STORED not in item.rows.column_names:
            yield item


# Clips in shards


class Clips(NamedTuple):
    """The clips of files that are decoded, and those that cannot be."""

    keys: pa.ChunkedArray
    stored: pa.Table  # samples, mix_fault and audio
    verdicts: Mapping[bytes, AudioError]  # by key
    files: pa.Table  # FILES, as they are now

    @classmethod
    def of(cls, tables: Iterable[ShardTable], files: pa.Table, locator: "Locator") -> "Clips":
        """Collect the clips in shards whose files are as they were."""
        clips = [pa.schema(list(CLIP_TYPE)).empty_table()]
        stored = [STORED_SCHEMA.empty_table()]
        left_out: list[Sequence[Any]] = []
        for table in tables:
            clips.append(pa.Table.from_struct_array(table.table[AUDIO]))
            stored.append(locator.locate(table))
            left_out += table.facts.left_out
        decoded = pa.concat_tables(clips)
        is_current = are_current(
            files, decoded["path"], sizes=decoded["file_size"], times=decoded["file_time"]
        )
        return cls(
            join_keys(decoded["path"], decoded["part"]).filter(is_current),
            pa.concat_tables(stored).filter(is_current),
            _find_verdicts(left_out, files),
            files,
        )

    def find(self, manifest: Manifest) -> pa.ChunkedArray:
        """Return the row of each clip, null for one that is not decoded."""
        return pc.index_in(clip_keys(manifest), value_set=self.keys)

    def missing(self, manifest: Manifest) -> Manifest:
        """Return the clips to decode: those of files that can be reached, without a verdict."""
        manifest = manifest.filter(pc.is_null(self.find(manifest)).to_numpy())
        gone = self.files["path"].filter(pc.less(self.files["size"], 0))
        judged = pa.array([*self.verdicts], pa.large_binary())
        is_gone = pc.is_in(manifest.rows[AUDIO].cast(pa.large_binary()), value_set=gone)
        is_judged = pc.is_in(clip_keys(manifest), value_set=judged)
        return manifest.filter(~pc.or_(is_gone, is_judged).to_numpy())

    def join(self, manifest: Manifest) -> tuple[Manifest, dict[int, AudioError]]:
        """Add the place of the audio; return the clips that have one, and errors by row."""
        rows = self.find(manifest)
        is_found = pc.is_valid(rows).to_numpy()
        errors: dict[int, AudioError] = {}
        lost = np.flatnonzero(~is_found)
        keys = clip_keys(manifest).take(pa.array(lost)).to_pylist()
        for row, key in zip(lost.tolist(), keys, strict=True):
            path = printable(os.fsdecode(key.partition(KEY_SEPARATOR)[0]))
            missing = AudioError("missing", f"{path} is missing, or cannot be read.")
            errors[row] = self.verdicts.get(key, missing)
        stored = take_rows(self.stored, pc.drop_null(rows).to_numpy())
        found = manifest.filter(is_found)
        located = found.rows.append_column(STORED, stored.to_struct_array())
        return replace(found, rows=located), errors


def are_current(
    files: pa.Table, paths: pa.ChunkedArray, *, sizes: pa.ChunkedArray, times: pa.ChunkedArray
) -> pa.ChunkedArray:
    """Return whether the files at these paths have these sizes and times."""
    now = files.take(pc.index_in(paths, value_set=files["path"]))
    is_current = pc.and_(pc.equal(now["size"], sizes), pc.equal(now["time"], times))
    return is_current.fill_null(False)


def _find_verdicts(
    left_out: Sequence[Sequence[Any]], files: pa.Table
) -> Mapping[bytes, AudioError]:
    """Return why clips cannot be decoded, by their keys, if their files are as they were."""
    names = [os.fsencode(path) for path, *_ in left_out]
    is_current = are_current(
        files,
        pa.chunked_array([pa.array(names, pa.large_binary())]),
        sizes=pa.chunked_array([pa.array([row[2] for row in left_out], pa.int64())]),
        times=pa.chunked_array([pa.array([row[3] for row in left_out], pa.int64())]),
    )
    verdicts: dict[bytes, AudioError] = {}
    for name, current, row in zip(names, is_current.to_pylist(), left_out, strict=True):
        _, part, _, _, _, reason, message = row
        if current:
            key = name + KEY_SEPARATOR + part.encode() if part else name
            verdicts[key] = AudioError(reason, message)
    return verdicts


@dataclass(frozen=True)
class Locator:
    """How rows name the shards of a corpus.

    prefix: of the names of shards, such as the corpus's folder in the cache.
    numbers: of units, by name; epochs are read in windows of shards. Empty in the cache.
    """

    sample_rate: int
    prefix: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)

    def locate(self, shard: ShardTable) -> pa.Table:
        """Return samples, mix_fault and audio of a shard's table."""
        number = self.numbers.get(unit_of(shard.name), 0)
        file = f"{self.prefix}{shard.name}.arrow"
        return locations_of(shard.table, file, shard=number, sample_rate=self.sample_rate)


# Writing


class RowWriter:
    """Writes the rows of splits, with the place of their audio.

    folder: for the rows.
    storage: has the shards.
    shards: their names, by unit.
    work: what the units have in common.
    clips: those of files.
    ending: of the names of files of rows, before the suffix.
    """

    def __init__(
        self,
        folder: Path,
        storage: Storage,
        *,
        shards: Mapping[str, Sequence[str]],
        work: Work,
        locator: Locator,
        clips: Clips,
        ending: str = "",
    ) -> None:
        self._folder, self._storage, self._ending = folder, storage, ending
        self._shards, self._work, self._locator, self._clips = shards, work, locator, clips
        self.files = [clips.files]  # of all rows

    def write(self, corpus: Corpus, sources: Sources) -> dict[str, Any]:
        """Write the rows of all splits; return the facts about each, as plain data."""
        located: Mapping[str, Iterable[Manifest]]
        located = {split: self._locate(split, items) for split, items in sources.items()}
        if (where := corpus.settings.get("where")) and has_tables(sources):
            located = filter_splits(located, where)
        return {split: self._write_split(split, blocks) for split, blocks in located.items()}

    def _locate(self, split: str, items: Iterable[Manifest | AudioTable]) -> Iterator[Manifest]:
        """Add the place of the audio to manifests, and yield the rows of tables."""
        for is_table, group in groupby(items, key=lambda item: isinstance(item, AudioTable)):
            if is_table:
                tables = [item for item in group if isinstance(item, AudioTable)]
                yield from self._rows_of_tables(split, tables)
                continue
            manifests = (item for item in group if isinstance(item, Manifest))
            for is_stored, blocks in groupby(manifests, key=is_located):
                if is_stored:
                    yield from blocks
                elif self._work.store == LAZY:
                    yield from map(self._plan_lazy, blocks)
                else:
                    found, errors = self._clips.join(joined := Manifest.join(blocks))
                    yield from exclude(joined, found, errors).blocks()

    def _plan_lazy(self, block: Manifest) -> Manifest:
        files = stat_files(pc.unique(block.rows[AUDIO]))
        self.files.append(files)
        found, errors = plan_lazy(block, files, self._work.sample_rate)
        return exclude(block, found, errors)

    def _rows_of_tables(self, split: str, tables: Sequence[AudioTable]) -> Iterator[Manifest]:
        """Yield the rows of tables with audio, shard by shard, all with the same columns."""
        works = (replace(self._work, split=split, table=table) for table in tables)
        names = [*chain.from_iterable(self._shards[work.name] for work in works)]
        # Of all shards, only the names of columns and the hashes of ids are kept.
        schemas, hashes = [pa.schema([])], [np.empty(0, np.int64)]
        for shard in read_shard_tables(self._storage, names):
            schemas.append(shard.table.schema)
            hashes.append(hash_texts(shard.table["id"]))
        columns = pa.unify_schemas(schemas, promote_options="default").empty_table()
        columns = columns.drop_columns(["samples", MIX_FAULT, AUDIO]) if names else columns
        seen: set[str] | None = None if are_distinct(hashes) else set()
        first_row = 0
        for shard in read_shard_tables(self._storage, names):
            rows = pa.concat_tables([columns, shard.table], promote_options="default")
            rows = rows.select(columns.column_names)
            if seen is not None:
                ids = _rename_repeated(rows["id"], seen, first_row)
                rows = rows.set_column(rows.column_names.index("id"), "id", ids)
            rows = rows.append_column(AUDIO, rows["id"].cast(pa.binary()))  # unique like a path
            stored = self._locator.locate(shard).to_struct_array()
            excluded = tuple(Excluded(*row[-3:]) for row in shard.facts.left_out)
            yield Manifest(rows.append_column(STORED, stored), excluded)
            first_row += len(rows)

    def _write_split(self, split: str, blocks: Iterable[Manifest]) -> dict[str, Any]:
        facts = SplitFacts(split)
        tables = map(facts.add, blocks)
        first = next(tables, None)
        if first is None:
            first = facts.add(Manifest.join([]))
        file = self._folder / f"{split}{self._ending}.arrow"
        temporary = temporary_path(file)
        with (
            pa.OSFile(str(temporary), "wb") as stream,
            pa.ipc.new_stream(stream, first.schema) as writer,
        ):
            for table in chain([first], tables):
                writer.write_table(table.combine_chunks())  # also empty chunks would be written
        temporary.replace(file)
        return facts.result()


class SplitFacts:
    """What is counted and hashed while the rows of a split are written."""

    def __init__(self, split: str) -> None:
        self._split = split
        self._num_rows = self._num_used = 0
        self._excluded: list[Excluded] = []
        self._filtered = Counter[str]()
        self._digest = hashlib.sha256()  # of ids, sentences, lengths and audio
        self._fingerprint = hashlib.sha256()  # of all columns

    def add(self, block: Manifest) -> pa.Table:
        """Return the rows of a located block as they are written."""
        self._num_used += len(block)
        self._num_rows += len(block) + len(block.excluded)
        self._excluded += [replace(row, split=self._split) for row in block.excluded]
        self._filtered.update(block.filtered)
        rows = block.rows
        if STORED not in rows.column_names:  # a split without any row
            rows = rows.append_column(STORED, pa.array([], pa.struct(list(STORED_SCHEMA))))
        stored = pa.Table.from_struct_array(rows[STORED])
        names = [name for name in rows.column_names if name not in RESERVED_COLUMNS]
        table = pa.table(
            {name: rows[name] for name in ("id", "sentence")}
            | {name: stored[name] for name in ("samples", MIX_FAULT)}
            | {name: rows[name] for name in names}
            | {AUDIO: stored[AUDIO]}
        )
        audio = pa.Table.from_struct_array(table[AUDIO])
        # The plan of an epoch depends on the number of the unit.
        places = pc.if_else(pc.equal(audio["shard"], 0), "", audio["shard"].cast(pa.string()))
        samples = table["samples"].cast(pa.string())
        own = (table["id"], table["sentence"], samples, audio["digest"], places)
        _update(self._digest, own)
        self._fingerprint.update(to_json(names).encode())
        # Of lazy audio, two files may have one size.
        files = pc.if_else(audio["start"].is_null(), audio["file"], "")
        others = (table[name].cast(pa.string()).fill_null("\1") for name in names)  # "" is a value
        _update(self._fingerprint, [*own, files, *others])
        return table

    def result(self) -> dict[str, Any]:
        """Return the facts; raises DataError if too many rows are unusable."""
        check_loss(self._split, self._excluded, self._num_rows)
        return {
            "rows": self._num_used,
            "digest": self._digest.hexdigest(),
            "fingerprint": self._fingerprint.hexdigest()[:NUM_DIGITS],
            "excluded": [asdict(row) for row in self._excluded],
            "filtered": dict(self._filtered),
        }


def _update(hash: "hashlib._Hash", columns: Sequence[pa.ChunkedArray]) -> None:
    lines = pc.binary_join_element_wise(*columns, "\0", null_handling="replace").to_pylist()
    hash.update("".join(f"{line}\n" for line in lines).encode())


def read_split(
    folder: Path, name: str, facts: Mapping[str, Any], ending: str = ""
) -> PreparedSplit:
    """Map the rows of a split."""
    file = folder / f"{name}{ending}.arrow"
    table = MemoryMappedTable.from_file(str(file))
    if len(table) != facts["rows"]:
        raise ValueError(f"{file} has another number of rows")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(table, fingerprint=facts["fingerprint"])
    excluded = [Excluded(**row) for row in facts["excluded"]]
    return PreparedSplit(dataset, excluded, facts["digest"], facts["filtered"])


def is_located(manifest: Manifest) -> bool:
    """Return whether the audio of a manifest lies in a prepared corpus."""
    return STORED in manifest.rows.column_names


def exclude(manifest: Manifest, found: Manifest, errors: Mapping[int, AudioError]) -> Manifest:
    """Add the clips without usable audio to the excluded rows of those that were found."""
    lost = [
        Excluded(manifest.ids[row], reason_of(error), str(error)) for row, error in errors.items()
    ]
    return replace(found, excluded=(*manifest.excluded, *lost))


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise DataError if more than `MAX_UNUSABLE_SHARE` of ``total`` rows is unusable."""
    lost = [row for row in lost if row.reason != CUT_SHORT]  # of a clip that is used
    if len(lost) <= MAX_UNUSABLE_SHARE * total:
        return
    reasons = Counter(row.reason for row in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    examples = "; ".join(f"{row.id}: {row.detail}" for row in lost[:3])
    raise DataError(
        f"{len(lost)} of {total} rows of {split} are unusable ({counts}); at most "
        f"{MAX_UNUSABLE_SHARE:.0%} may be. The first of them: {examples}"
    )


def _rename_repeated(ids: pa.ChunkedArray, seen: set[str], first_row: int) -> pa.ChunkedArray:
    """Append the row to repeated ids: several tables may have clips of the same name."""
    names: list[str] = []
    for row, id in enumerate(ids.to_pylist(), start=first_row):
        names.append(f"{id}-{row}" if id in seen else id)
        seen.add(id)
    return pa.chunked_array([pa.array(names, pa.string())])


# Lazy audio


def plan_lazy(
    manifest: Manifest, files: pa.Table, sample_rate: int
) -> tuple[Manifest, dict[int, AudioError]]:
    """Add places to clips that are decoded when they are read, as `Clips.join` does.

    Their lengths are the durations that the corpus states.
    """
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
    paths = rows[AUDIO].cast(pa.large_binary())
    file_sizes = files["size"].take(pc.index_in(paths, value_set=files["path"])).to_numpy()
    errors: dict[int, AudioError] = {}
    for row, path in enumerate(manifest.paths):
        if file_sizes[row] < 0 or path.encode(errors="ignore").decode() != path:
            fault = f"{printable(path)} is missing, cannot be read, or its name is not UTF-8."
            errors[row] = AudioError("missing", fault)
        elif is_empty[row]:
            errors[row] = AudioError("no samples", f"The corpus states 0 ms for {path}.")
    is_readable = np.ones(len(rows), bool)
    is_readable[[*errors]] = False
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
    }
    stored = {
        "samples": samples,
        MIX_FAULT: pa.repeat("", count),
        AUDIO: pa.table(audio, pa.schema(list(AUDIO_TYPE))).to_struct_array(),
    }
    found = manifest.filter(is_readable)
    located = found.rows.append_column(STORED, pa.table(stored).to_struct_array())
    return replace(found, rows=located), errors
