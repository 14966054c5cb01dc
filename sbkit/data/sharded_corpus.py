"""A corpus of shards: written by any number of processes, read from a folder or any URL of fsspec.

sbkit-shards.json      the index, written last: sample rate, splits and names
SPLIT-KEY-NNN.arrow    the audio of a shard, as `sbkit.data.shard` describes it
SPLIT-KEY-NNN.parquet  its clips, and the position of their audio

To write a corpus, each split is divided into units, whose names follow from their content. On a
disk with locks, each process takes units that no other one holds; elsewhere it takes its share by
`--share`, SLURM_ARRAY_TASK_ID or RANK. The process that finds all shards writes the index.
"""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.arrays import Counts
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import from_plain, size_and_mtime, task_lock
from sbkit.base.messages import plural
from sbkit.base.units import MICROSECONDS
from sbkit.data.cache import is_archive
from sbkit.data.clip_decoding import by_file, decode_clips
from sbkit.data.corpus import Corpus, SettingValues
from sbkit.data.filesystem import Storage, disk_errors
from sbkit.data.manifest import (
    MIX_FAULT,
    PART_COLUMNS,
    STORED,
    Excluded,
    Manifest,
    are_distinct,
    hash_texts,
)
from sbkit.data.shard import (
    AUDIO,
    ShardFacts,
    ShardWriter,
    check_audio,
    has_mix_faults,
    read_shard_table,
    remove_leftovers,
    share_work,
    to_located_audio,
)
from sbkit.data.splits import check_loss, reason_of
from sbkit.logs.progress import progress_bar

logger = logging.getLogger(__name__)

INDEX_FILE = "sbkit-shards.json"
INDEX_FORMAT = 3
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)")
UNIT_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
PREPARE_AGAIN = "Run `sbkit prepare YAML --shards` again: only missing shards are written."
PROBED_CLIPS = 100  # decoded to estimate the size of all
STORE_SIZES = {"pcm": 1.0, "flac": 0.6}  # bytes, relative to those of the samples


# Reading


@dataclass(frozen=True)
class Index:
    """What all shards of a corpus have in common."""

    sample_rate: int  # Hz
    roles: Mapping[str, Sequence[str]]  # the splits of each role
    splits: Mapping[str, Sequence[str]]  # the names of the shards of each split
    corpus: Mapping[str, str | None]  # its name and its license


class ShardedCorpus(Corpus):
    """The shards in a folder or at a URL; their audio is not read with the rows."""

    layout = "shards of `sbkit prepare --shards`"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder or URL has the index of shards."""
        location = settings.get("data_folder")
        if not location or settings.get("manifest") or is_archive(Path(location)):
            return False
        return Storage(str(location)).sizes([INDEX_FILE]) != [None]

    @property
    def _storage(self) -> Storage:
        return Storage(str(self.settings["data_folder"]))

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the splits of each role as prepared."""
        return read_index(self._storage).roles

    def about(self) -> Mapping[str, str | None]:
        """Return the name and the license of the corpus that became shards."""
        return read_index(self._storage).corpus

    def files(self) -> list[Path] | None:
        """Return the index and the tables; None for a URL."""
        folder = self._storage.folder
        return None if folder is None else [folder / INDEX_FILE, *sorted(folder.glob("*.parquet"))]

    def read(self, split: str) -> Iterator[Manifest]:
        """Yield the rows of one split, shard by shard."""
        storage = self._storage
        index = read_index(storage)
        if index.sample_rate != self.settings["sample_rate"]:
            raise ConfigError(
                f"`sample_rate` is {self.settings['sample_rate']}, but the shards in "
                f"{storage.url} have {index.sample_rate} Hz. "
                f"Set `sample_rate: {index.sample_rate}`."
            )
        names = index.splits[split]
        first = 1 + list(chain.from_iterable(index.splits.values())).index(names[0])
        # Of all shards, only the names of columns, the hashes of ids and whether there is a fault
        # are kept: repeated ids get another name, and all blocks have the same columns.
        read_table: Callable[[str], tuple[pa.Table, ShardFacts]] = partial(_read_table, storage)
        if storage.folder is None:
            read_table = lru_cache(maxsize=None)(read_table)  # each table is fetched once
        schemas: list[pa.Schema] = []
        hashes: list[Counts] = []
        sizes: dict[str, int] = {}
        has_faults = False
        for name in names:
            table, facts = read_table(name)
            sizes[f"{name}.arrow"] = facts.bytes
            schemas.append(table.schema)
            hashes.append(hash_texts(table["id"]))
            has_faults = has_faults or has_mix_faults(table)
        _check_sizes(storage, sizes)
        columns = pa.unify_schemas(schemas, promote_options="default").empty_table()
        columns = columns.drop_columns(["samples", MIX_FAULT, AUDIO])
        seen: set[str] | None = None if are_distinct(hashes) else set()
        first_row = 0
        for number, name in enumerate(names):
            table, facts = read_table(name)
            file = storage.url_of(f"{name}.arrow")
            audio = to_located_audio(
                table, file, shard=first + number, sample_rate=index.sample_rate
            )
            # The plan of an epoch depends on the number of the shard, so the fingerprint must, too.
            digests = pc.binary_join_element_wise(audio["digest"], str(number), "@")
            audio = audio.set_column(1, "digest", digests)
            if not has_faults:
                audio = audio.drop_columns([MIX_FAULT])
            rows = pa.concat_tables([columns, table], promote_options="default")
            rows = rows.select(columns.column_names)
            ids = rows["id"] if seen is None else _rename_repeated(rows["id"], seen, first_row)
            rows = rows.set_column(rows.column_names.index("id"), "id", ids)
            rows = rows.append_column(AUDIO, ids.cast(pa.binary()))  # unique like a path
            rows = rows.append_column(STORED, audio.to_struct_array())
            yield Manifest(rows, tuple(Excluded(*row) for row in facts.left_out))
            first_row += len(rows)


def _check_sizes(storage: Storage, expected: Mapping[str, int]) -> None:
    sizes = storage.sizes(list(expected))
    for (name, expected_size), size in zip(expected.items(), sizes, strict=True):
        if size != expected_size:
            state = "is missing" if size is None else f"has {size} bytes instead of {expected_size}"
            raise DataError(f"{storage.url_of(name)} {state}. {PREPARE_AGAIN}")


def _rename_repeated(ids: pa.ChunkedArray, seen: set[str], first_row: int) -> pa.ChunkedArray:
    """Append the row to repeated ids: table folders may have clips of the same name."""
    names: list[str] = []
    for row, id in enumerate(ids.to_pylist(), start=first_row):
        names.append(f"{id}-{row}" if id in seen else id)
        seen.add(id)
    return pa.chunked_array([pa.array(names, pa.string())])


def read_index(storage: Storage) -> Index:
    """Read the index of a folder of shards."""
    content = storage.read(INDEX_FILE)
    try:
        values = json.loads(content)
        if values.pop("format") != INDEX_FORMAT:
            raise ValueError("another format")
        index = from_plain(Index, values)
        if unknown := {*chain.from_iterable(index.roles.values())} - index.splits.keys():
            raise ValueError(f"its roles name the unknown split {min(unknown)}")
        return index
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"{storage.url_of(INDEX_FILE)} is not an index of `sbkit prepare --shards` "
            f"({str(error)[:100]})."
        ) from error


def verify_shards(location: str) -> int:
    """Read all that an index names; log the tables of damaged shards, and return their number."""
    storage = Storage(location)
    num_damaged = 0
    names = [*chain.from_iterable(read_index(storage).splits.values())]
    with progress_bar("verifying shards", len(names)) as advance:
        for name in names:
            try:
                table, facts = _read_table(storage, name)
                _check_sizes(storage, {f"{name}.arrow": facts.bytes})
                check_audio(table, storage.url_of(f"{name}.arrow"))
            except DataError:
                num_damaged += 1
                logger.info(storage.url_of(f"{name}.parquet"))
            advance(1)
    logger.info(f"{plural(num_damaged, 'damaged shard')} in {storage.url}")
    if num_damaged:
        logger.info("Remove the tables above. `sbkit prepare YAML --shards` writes them again.")
    return num_damaged


def _read_table(storage: Storage, name: str) -> tuple[pa.Table, ShardFacts]:
    content = storage.read(f"{name}.parquet")
    try:
        return read_shard_table(content)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{storage.url_of(name)}.parquet is damaged ({str(error)[:100]}). Remove it. "
            f"{PREPARE_AGAIN}"
        ) from error


# Writing


@dataclass(frozen=True)
class ShardOptions:
    """How shards are written."""

    sample_rate: int  # Hz
    store: str  # pcm or flac
    shard_bytes: int
    seed: int  # of the random order

    def name(self, split: str, *content: object) -> str:
        """Return the name of a unit, which changes with its content and with these options."""
        text = "\n".join(map(str, (self, *content)))
        return f"{split}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"


@dataclass(frozen=True)
class Unit:
    """Rows that one process writes into one or more shards; a shard has whole parts."""

    name: str  # the start of the names of its shards
    parts: Callable[[int], Iterator[Manifest]]  # from the part with this index on


def parse_size(text: str) -> int:
    """Return the number of bytes of a size.

    >>> parse_size("1.5 MB")
    1500000
    """
    match = SIZE_PATTERN.fullmatch(text)
    size = int(float(match[1]) * UNIT_BYTES[match[2]]) if match else 0
    if size <= 0:
        raise ConfigError(
            f"The size of a shard must be a number and kB, MB or GB, such as 1GB, but is {text!r}."
        )
    return size


def write_shards(
    storage: Storage,
    options: ShardOptions,
    sources: Mapping[str, Manifest],
    roles: Mapping[str, Sequence[str]],
    corpus: Mapping[str, str | None] | None = None,
    share: tuple[int, int] | None = None,  # this process's number, from 1, and the total
) -> Index | None:
    """Write the missing shards of each split; return the index, None while others still work."""
    if options.store not in STORE_SIZES:
        raise ConfigError(
            f"`audio_store` must be pcm or flac, but is {options.store}. Set `audio_store: flac`."
        )
    with TemporaryDirectory() as folder, disk_errors(storage.folder or folder):
        scratch = Path(folder)
        if storage.folder is not None:
            storage.folder.mkdir(parents=True, exist_ok=True)
        units: dict[str, list[Unit]] = {}
        for split, source in sources.items():
            units[split] = _divide(split, source, options)
        if share is None:
            share = work_share(os.environ) if storage.folder is None else (1, 1)
        number, total = share
        due = [*chain.from_iterable(units.values())][number - 1 :: total]
        _write_units(storage, options, scratch, due)
        shard_names = _finish(storage, options, units)
        if shard_names is None:
            logger.info("Other processes are still writing; the last one writes the index.")
            return None
        index = Index(options.sample_rate, roles, shard_names, corpus or {})
        text = json.dumps({"format": INDEX_FORMAT, **asdict(index)}, indent=1, ensure_ascii=False)
        with task_lock(storage.folder, INDEX_FILE, wait=True) if storage.folder else nullcontext():
            storage.write(INDEX_FILE, text.encode())
            if storage.folder:
                remove_leftovers(storage.folder)
        return index


def _divide(split: str, manifest: Manifest, options: ShardOptions) -> list[Unit]:
    """Divide the clips of a manifest, in random order, into units of one shard each.

    The size of the audio is estimated, so that every process finds the same units without decoding
    all clips. Parts of one recording are together, because it is read for each of their shards.
    """
    order = np.random.default_rng(options.seed).permutation(len(manifest))
    versions = [size_and_mtime(path) for path in manifest.paths]
    clips = [*manifest.parts]
    sizes = [size for size, _ in versions]
    if manifest.has_parts:
        order = order[by_file(clips[row] for row in order)]
        bytes_per_second = 2 * options.sample_rate * STORE_SIZES[options.store]
        expected = sum(
            size if end is None else (end - start) / MICROSECONDS * bytes_per_second
            for size, (_, start, end, _) in zip(sizes, clips, strict=True)
        )
    else:
        probed = order[:PROBED_CLIPS].tolist()
        probed_clips = [clips[row] for row in probed]
        decoding = decode_clips(probed_clips, options.sample_rate, store=options.store)
        decoded_bytes = sum(len(clip.audio) for clip in decoding if isinstance(clip.audio, bytes))
        expected = sum(sizes) * decoded_bytes / max(1, sum(sizes[row] for row in probed))
    num_shards = max(1, min(round(expected / options.shard_bytes), len(manifest)))
    units = []
    for number, rows in enumerate(np.array_split(order, num_shards)):
        excluded = manifest.excluded if number == 0 else ()
        part = replace(manifest.take(rows), excluded=excluded)
        part_versions = [versions[row] for row in rows.tolist()]
        name = options.name(split, excluded, part_versions, part.rows.to_pylist())
        units.append(Unit(name, partial(_single_part, part)))
    return units


def _single_part(part: Manifest, start: int) -> Iterator[Manifest]:
    return iter([part][start:])


def _write_units(
    storage: Storage, options: ShardOptions, scratch: Path, units: Sequence[Unit]
) -> None:
    """Write the units that no other process writes."""
    with progress_bar("writing shards", len(units)) as advance:

        def write(unit: Unit) -> None:
            _write_unit(storage, options, scratch, unit)
            advance(1)

        if storage.folder is not None:
            share_work(storage.folder, [(unit.name, partial(write, unit)) for unit in units])
        else:
            for unit in units:
                write(unit)


def work_share(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's number, from 1, and the total, from SLURM's array or torchrun."""
    try:
        if any(name.startswith("SLURM_ARRAY_TASK_") for name in variables):
            first = int(variables["SLURM_ARRAY_TASK_MIN"])
            processes = int(variables["SLURM_ARRAY_TASK_COUNT"])
            step = int(variables.get("SLURM_ARRAY_TASK_STEP", "1"))
            index = (int(variables["SLURM_ARRAY_TASK_ID"]) - first) // step
        else:
            index = int(variables.get("RANK", "0"))
            processes = int(variables.get("WORLD_SIZE", "1"))
        if index >= processes:
            raise ValueError(f"number {index} of {processes}")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "Processes that share the work need numbers without gaps, from SLURM_ARRAY_TASK_ID, "
            f"_MIN and _COUNT, or from RANK and WORLD_SIZE, but this one has {error}."
        ) from error
    return index + 1, processes


def _write_unit(storage: Storage, options: ShardOptions, scratch: Path, unit: Unit) -> None:
    shards = list(_finished(storage, unit))
    if shards and shards[-1].facts.last:
        return
    num_parts = shards[-1].facts.parts if shards else 0
    parts = unit.parts(num_parts)
    part = next(parts, None)
    for number in count(len(shards)):
        with closing(ShardWriter(storage.folder or scratch)) as writer:
            written: list[Manifest] = []
            left_out: list[tuple[str, str, str]] = []
            while part is not None and writer.audio_bytes < options.shard_bytes:
                ids = part.ids
                added, errors = writer.add_clips(
                    ids, [*part.parts], options.sample_rate, store=options.store
                )
                written.append(part.take(added))
                left_out += [(row.id, row.reason, row.detail) for row in part.excluded]
                left_out += [
                    (ids[row], reason_of(error), str(error)) for row, error in errors.items()
                ]
                part = next(parts, None)
                num_parts += 1
            rows = Manifest.join(written).rows
            name = f"{unit.name}-{number:03d}"
            columns = {
                column: rows[column]
                for column in rows.column_names
                if column not in (AUDIO, *PART_COLUMNS)
            }
            is_last = part is None
            writer.publish(
                storage, name, columns, left_out=left_out, parts=num_parts, is_last_part=is_last
            )
            logger.info(f"{name}: {len(rows)} clips, {writer.audio_bytes / 1e6:.1f} MB")
        if is_last:
            return


class FinishedShard(NamedTuple):
    """A shard that was written: its name, table and facts."""

    name: str
    table: pa.Table
    facts: ShardFacts


def _finished(storage: Storage, unit: Unit) -> Iterator[FinishedShard]:
    """Yield the shards of a unit up to the first missing one."""
    for number in count():
        name = f"{unit.name}-{number:03d}"
        table_bytes, audio_bytes = storage.sizes([f"{name}.parquet", f"{name}.arrow"])
        if table_bytes is None:
            return
        table, facts = _read_table(storage, name)
        if facts.bytes != audio_bytes:
            return
        yield FinishedShard(name, table, facts)
        if facts.last:
            return


def _finish(
    storage: Storage, options: ShardOptions, units: Mapping[str, Sequence[Unit]]
) -> dict[str, list[str]] | None:
    """Return the names of the shards of each split, or None if some are missing."""
    names: dict[str, list[str]] = {}
    for split, split_units in units.items():
        shards: list[FinishedShard] = []
        for unit in split_units:
            unit_shards = list(_finished(storage, unit))
            if not unit_shards or not unit_shards[-1].facts.last:
                return None
            shards += unit_shards
        names[split] = [shard.name for shard in shards]
        lost = [
            replace(Excluded(*row), split=split) for shard in shards for row in shard.facts.left_out
        ]
        num_clips = sum(len(shard.table) for shard in shards)
        check_loss(split, lost, num_clips + len(lost))
        samples = sum(pc.sum(shard.table["samples"]).as_py() or 0 for shard in shards)
        hours = samples / options.sample_rate / 3600
        logger.info(f"{split}: {num_clips} clips, {hours:.2f} h, {plural(len(shards), 'shard')}")
        for reason, number in Counter(row.reason for row in lost).items():
            logger.info(f"{split}: {number} left out, {reason}")
    return names
