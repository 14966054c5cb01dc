"""A corpus in shards: Arrow files of about a gigabyte, each beside a table of what is in it.

<data_folder>/sbkit-shards.json     the index, written last: rate, splits, sizes and checksums
             SPLIT-KEY-NNN.arrow    audio, as `audio_store` keeps it, a row for each clip
             SPLIT-KEY-NNN.parquet  what else is known of the rows, and where their audio lies

The folder may be any URL that fsspec reads. Plans are made of the tables; of the audio each process
reads the clips of its own batches, as ranges of bytes, each of which has its checksum.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clips
from sbkit.data.corpora.manifest import BadRow, Manifest
from sbkit.data.corpora.parquet import ParquetFile
from sbkit.data.corpora.roles import resolve_splits
from sbkit.data.storage.audio_store import PLACE, SHARDED, WITH_AUDIO
from sbkit.data.storage.filesystem import Storage

INDEX = "sbkit-shards.json"
FORMAT = 1
FACTS = b"sbkit"  # the key of a table's metadata that holds its `ShardFacts`
NAME = re.compile(r"[\w.+-]+")
NUMBERS = {"samples", *(f"{SHARDED}.{name}" for name in ("start", "size", "crc32"))}
OWN = {"id", "sentence", f"{SHARDED}.digest", *NUMBERS}  # columns of every table, flat


@dataclass(frozen=True)
class ShardFacts:
    """What is known of one shard.

    name: of its files, without their endings; bytes, sha256: of the Arrow file; clips, samples: in
    it; sources: rows of the corpus that were read for it, from the first of its part of the corpus
    on; last: whether they are all; left_out: id, reason and detail of those that hold no audio.
    """

    name: str
    bytes: int
    sha256: str
    clips: int
    samples: int
    sources: int
    last: bool
    left_out: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Listed:
    """One shard as the index lists it; ``table_sha256`` is that of its parquet file."""

    name: str
    bytes: int
    sha256: str
    clips: int
    samples: int
    table_sha256: str


@dataclass(frozen=True)
class Index:
    """What a corpus in shards holds; ``roles`` are its splits of train, valid and test."""

    sample_rate: int
    store: str
    roles: Mapping[str, Sequence[str]]
    splits: Mapping[str, Sequence[Listed]]


def recognizes(place: str) -> bool:
    """Check whether a folder or URL holds the index of shards."""
    return Storage.at(place).sizes([INDEX]) != [None]


def splits(knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else as they were prepared.

    Raises:
        SbkitError: the index is none.
    """
    index = read_index(Storage.at(knobs["data_folder"]))
    return resolve_splits(knobs.get("splits"), index.roles, list(index.splits))


def read(knobs: Mapping[str, Any], split: str) -> Manifest:
    """Return the rows of one split, whose audio stays where it is.

    Raises:
        SbkitError: a shard is missing, cut short or of another rate.
    """
    storage = Storage.at(knobs["data_folder"])
    index = read_index(storage)
    if index.sample_rate != knobs["sample_rate"]:
        raise SbkitError(
            f"`sample_rate` must be that of the shards in {storage.url} ({index.sample_rate} Hz), "
            f"but is {knobs['sample_rate']}. Pass --sample_rate={index.sample_rate}, or prepare "
            "shards at that rate."
        )
    shards = index.splits[split]
    if not shards:
        raise SbkitError(
            f"The split {split} must have a shard, but the index in {storage.url} lists none. "
            "Prepare the shards again."
        )
    for name, state in missing_shards(storage, shards)[:1]:
        raise SbkitError(
            f"{storage.file(name)} must be as it was written, but {state}. Copy it again, or "
            "prepare the shards again: only what is missing is written."
        )
    tables, stored, bad = list[pa.Table](), list[pa.Table](), list[BadRow]()
    contents = _read_tables(storage, shards)
    for number, (shard, content) in enumerate(zip(shards, contents, strict=True)):
        with _of_a_table(shard.name):
            file = ParquetFile(pa.BufferReader(content), size=len(content))
            table = pa.Table.from_batches(file.batches(), file.schema).combine_chunks()
            table.validate(full=True)  # text is UTF-8, too
            _require_columns(table)
            bad.extend(BadRow(*map(str, each)) for each in facts_of(content).left_out)
            stored.append(_stored(table, storage.file(f"{shard.name}.arrow"), index.store, number))
            tables.append(table.drop_columns(["samples", SHARDED]).replace_schema_metadata(None))
    # A shard has the columns of its own clips: of JSON Lines, not all rows have all of them.
    table = pa.concat_tables(tables, promote_options="default")
    return Manifest(_clips(table), tuple(bad), pa.concat_tables(stored))


def read_index(storage: Storage) -> Index:
    """Read the index of a folder of shards.

    Raises:
        SbkitError: it is missing, or not what `sbkit prepare` wrote.
    """
    (content,) = storage.read([INDEX])
    try:
        values = json.loads(content)
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        listed = {
            split: [Listed(**each) for each in shards]
            for split, shards in values.pop("splits").items()
        }
        roles = {role: list(names) for role, names in values.pop("roles").items()}
        index = Index(roles=roles, splits=listed, **values)
        names = [shard.name for shards in listed.values() for shard in shards]
        if index.store not in WITH_AUDIO or not all(map(NAME.fullmatch, names)):
            raise ValueError("impossible values")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{storage.file(INDEX)} must be the index that `sbkit prepare --shards` writes, but is "
            f"not ({str(error)[:100]}). Run that again."
        ) from error
    return index


def write_index(storage: Storage, index: Index) -> None:
    """Write the index, which makes a corpus of what is there."""
    text = json.dumps({"format": FORMAT, **asdict(index)}, indent=1, ensure_ascii=False)
    storage.write(INDEX, text.encode())


def facts_of(table: bytes) -> ShardFacts:
    """Return what a parquet file says of its shard; raises SbkitError where it is none."""
    with _of_a_table("a shard"):
        schema = pq.read_schema(pa.BufferReader(table))
        return ShardFacts(**json.loads(schema.metadata[FACTS]))


def listed(table: bytes) -> Listed:
    """Return what the index says of a shard, by its parquet file."""
    facts = asdict(facts_of(table))
    of_both = {field.name: facts[field.name] for field in fields(Listed) if field.name in facts}
    return Listed(**of_both, table_sha256=hashlib.sha256(table).hexdigest())


def missing_shards(storage: Storage, shards: Sequence[Listed]) -> list[tuple[str, str]]:
    """Return the files that are not there as they were written, and how they are."""
    wanted = {f"{shard.name}.arrow": shard.bytes for shard in shards}
    wanted |= {f"{shard.name}.parquet": 0 for shard in shards}
    missing = []
    for (name, size), found in zip(wanted.items(), storage.sizes(list(wanted)), strict=True):
        if found is None:
            missing.append((name, "is missing"))
        elif size and found != size:
            missing.append((name, f"has {found} bytes instead of {size}"))
    return missing


@contextmanager
def _of_a_table(shard: str) -> Iterator[None]:
    """Turn what damage ends in into one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as error:
        raise SbkitError(
            f"The table of {shard} (.parquet) must be as it was written, but is damaged "
            f"({str(error)[:100]}). Remove it, and prepare again."
        ) from error


def _read_tables(storage: Storage, shards: Sequence[Listed]) -> Iterator[bytes]:
    contents = storage.read([f"{shard.name}.parquet" for shard in shards])
    for shard, content in zip(shards, contents, strict=True):
        if hashlib.sha256(content).hexdigest() != shard.table_sha256:
            raise SbkitError(
                f"{storage.file(shard.name)}.parquet must have the checksum that the index has of "
                "it, but is damaged. Copy it again, or remove it and prepare the shards again: "
                "only what is missing is written."
            )
        yield content


def _require_columns(table: pa.Table) -> None:
    """Raise ValueError for columns that no shard has: who makes one up writes its checksum, too."""
    flat = table.flatten()
    for name in {*OWN, *flat.column_names}:
        column, kind = flat[name], pa.int64() if name in NUMBERS else pa.string()
        if column.type != kind or (name in OWN and column.null_count):
            raise ValueError(f"{name} is of another type, or not in all rows")


def _stored(table: pa.Table, file: str, store: str, number: int) -> pa.Table:
    """Return samples, digest and place of a shard's rows, for the file that they are in.

    The digests are given its number, too: the plan of an epoch follows from what lies in which.
    """
    column = table[SHARDED].combine_chunks()
    places = [pa.repeat(pa.scalar(each, pa.string()), len(table)) for each in (file, store)]
    places += [column.field(each.name) for each in list(PLACE)[2:]]
    digest = pc.binary_join_element_wise(column.field("digest"), pa.scalar(str(number)), "@")
    placed = pa.StructArray.from_arrays(places, fields=list(PLACE))
    return pa.table({"samples": table["samples"], "digest": digest, SHARDED: placed})


def _clips(table: pa.Table) -> Clips:
    ids = _unique(table["id"])
    own = pa.table({"id": ids, "path": ids.cast(pa.binary()), "sentence": table["sentence"]})
    return Clips(own, table.drop_columns(["id", "sentence"]))


def _unique(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """Number ids that come again: files that were streamed may hold clips of the same name."""
    if len(pc.unique(ids)) == len(ids):
        return ids
    names, seen = ids.to_pylist(), set[str]()
    taken = {*names}
    for place, id in enumerate(names):
        if id in seen:
            names[place] = next(n for n in (f"{id}-{k}" for k in count(2)) if n not in taken)
            taken.add(names[place])
        seen.add(id)
    return pa.chunked_array([pa.array(names, pa.string())])
