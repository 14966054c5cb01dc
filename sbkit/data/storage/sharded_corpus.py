"""A corpus of shards, in a folder or at any URL that fsspec reads.

<data_folder>/sbkit-shards.json            the index, written last: sample rate, splits and names
             SPLIT-KEY-NNN.{arrow,parquet}  shards, as `sbkit.data.storage.shard` describes them

Batches are planned from the tables. Each process reads the audio of its own batches, as ranges of
bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.data.storage.audio_store import AUDIO
from sbkit.data.storage.clips import Clips
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.manifest import BadRow, Manifest
from sbkit.data.storage.shard import ShardFacts, read_table, to_stored
from sbkit.data.storage.splits import resolve_splits

INDEX = "sbkit-shards.json"
FORMAT = 2


@dataclass(frozen=True)
class Index:
    """What a corpus of shards holds: the names of the shards of each split.

    ``roles`` are the splits of train, valid and test.
    """

    sample_rate: int
    roles: Mapping[str, Sequence[str]]
    splits: Mapping[str, Sequence[str]]


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
    first = 1 + list(chain.from_iterable(index.splits.values())).index(index.splits[split][0])
    tables, stored, sizes, bad = (
        list[pa.Table](),
        list[pa.Table](),
        dict[str, int](),
        list[BadRow](),
    )
    for number, name in enumerate(index.splits[split]):
        table, facts = open_table(storage, name)
        bad.extend(BadRow(*each) for each in facts.left_out)
        file = pa.repeat(storage.file(f"{name}.arrow"), len(table))
        audio = to_stored(table, file, shard=first + number, sample_rate=index.sample_rate)
        # The plan of an epoch depends on the shard's number, too.
        digests = pc.binary_join_element_wise(audio["digest"], str(number), "@")
        stored.append(audio.set_column(1, "digest", digests))
        tables.append(table.drop_columns(["samples", AUDIO]))
        if facts.bytes:
            sizes[f"{name}.arrow"] = facts.bytes
    for (name, size), found in zip(sizes.items(), storage.sizes(list(sizes)), strict=True):
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise SbkitError(
                f"{storage.file(name)} must be as it was written, but {state}. Copy it again, or "
                "prepare the shards again: only what is missing is written."
            )
    # A shard has the columns of its own clips: in JSON Lines, not all rows have all of them.
    joined = pa.concat_tables(tables, promote_options="default")
    ids = _unique(joined["id"])
    own = pa.table({"id": ids, "path": ids.cast(pa.binary()), "sentence": joined["sentence"]})
    clips = Clips(own, joined.drop_columns(["id", "sentence"]))
    return Manifest(clips, tuple(bad), pa.concat_tables(stored))


def read_index(storage: Storage) -> Index:
    """Read the index of a folder of shards.

    Raises:
        SbkitError: it is missing, or not what `sbkit prepare` wrote.
    """
    content = storage.read(INDEX)
    try:
        values = json.loads(content)
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        index = Index(**values)
        if type(index.sample_rate) is not int:
            kind = type(index.sample_rate).__name__
            raise TypeError(f"sample_rate must be an int, but is a {kind}, {index.sample_rate!r}")
        return index
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SbkitError(
            f"{storage.file(INDEX)} must be the index that `sbkit prepare --shards` writes, but is "
            f"not ({str(error)[:100]}). Run that again."
        ) from error


def write_index(storage: Storage, index: Index) -> None:
    """Write the index, which makes a corpus of what is there."""
    text = json.dumps({"format": FORMAT, **asdict(index)}, indent=1, ensure_ascii=False)
    storage.write(INDEX, text.encode())


def open_table(storage: Storage, name: str) -> tuple[pa.Table, ShardFacts]:
    """Read the table of a shard; raises SbkitError where it is damaged."""
    content = storage.read(f"{name}.parquet")
    try:
        return read_table(content)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise SbkitError(
            f"{storage.file(name)}.parquet must be as it was written, but is damaged "
            f"({str(error)[:100]}). Copy it again, or remove it and prepare the shards again: only "
            "what is missing is written."
        ) from error


def _unique(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """Number repeated ids: files that were streamed may hold clips of the same name."""
    seen, names = set[str](), list[str]()
    for row, id in enumerate(ids.to_pylist()):
        names.append(f"{id}-{row}" if id in seen else id)
        seen.add(id)
    return pa.chunked_array([pa.array(names, pa.string())])
