"""A corpus of shards, in a folder or at any URL that fsspec reads.

<data_folder>/sbkit-shards.json            the index, written last: sample rate, splits and names
             SPLIT-KEY-NNN.{arrow,parquet}  shards, as `sbkit.data.shard` describes them

Batches are planned from the tables. Each process reads the audio of its own batches, as ranges of
bytes.

Write a corpus of shards, by any number of processes that share the work.

A split is divided into units, each known by its content, which one process decodes in one order. On
a disk with locks each process takes what no other one holds; elsewhere it takes its share by
SLURM_ARRAY_TASK_ID or RANK. The index makes a corpus of the shards, and is written by the process
that finds all of them. A killed process loses its current shard.
"""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.base.messages import plural
from sbkit.data.corpus import resolve_splits
from sbkit.data.filesystem import Storage, writing
from sbkit.data.manifest import BadRow, Clips, Excluded, Manifest, free_name
from sbkit.data.shard import (
    AUDIO,
    ShardFacts,
    ShardWriter,
    claimed,
    decode_clips,
    read_table,
    remove_leftovers,
    share_work,
    to_stored,
)
from sbkit.data.sources import StreamedSplit, file_state
from sbkit.data.splits import UNREADABLE, check_loss
from sbkit.logs.progress import shown

logger = logging.getLogger(__name__)

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


SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)")
BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
PROBED = 100  # clips that are decoded to learn how large the audio of the others will be
Source = Manifest | StreamedSplit


@dataclass(frozen=True)
class ShardOptions:
    """How shards are made: audio at a rate (Hz) in a store, about so many bytes of it in each."""

    sample_rate: int
    store: str
    shard_bytes: int
    seed: int

    def name(self, split: str, *content: object) -> str:
        """Return the name of a unit, which changes with its content and with these options."""
        text = "\n".join(map(str, (self, *content)))
        return f"{split}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"


@dataclass(frozen=True)
class Unit:
    """Rows that one process writes; ``parts`` yields them from a number of parts on.

    A shard is full after the part that brings it to the wanted size. The name begins those of the
    unit's shards.
    """

    name: str
    parts: Callable[[int], Iterator[Manifest]]


def parse_size(text: str) -> int:
    """Return a number of bytes written as 1GB; raises SbkitError."""
    found = SIZE.fullmatch(text)
    size = int(float(found[1]) * BYTES[found[2]]) if found else 0
    if size <= 0:
        raise SbkitError(
            f"The size of a shard must be a number with its unit (kB, MB or GB), but is {text!r}. "
            "Write 1GB, for example."
        )
    return size


def write_shards(
    storage: Storage,
    options: ShardOptions,
    sources: Mapping[str, Source],
    roles: Mapping[str, Sequence[str]],
) -> Index | None:
    """Write what is missing of a corpus in shards; return its index, None where others still work.

    Args:
        storage: where to.
        options: the audio's rate and store, the size of a shard, and the seed of the order.
        sources: the rows of each split.
        roles: the splits of train, valid and test.

    Raises:
        SbkitError: the place cannot be written to, a disk is full, or more of a split is left out
            than a run may do without.
    """
    if options.store == "none":
        raise SbkitError(
            f"`audio_store` of shards must be pcm or flac, but is {options.store}: they hold the "
            "audio. Pass --audio_store=flac."
        )
    with writing(storage.url), TemporaryDirectory() as folder:
        scratch = Path(folder)
        if storage.folder is not None:
            storage.folder.mkdir(parents=True, exist_ok=True)
        units = {
            split: _stream_units(split, source, options, scratch)
            if isinstance(source, StreamedSplit)
            else _manifest_units(split, source, options)
            for split, source in sources.items()
        }
        every = [unit for some in units.values() for unit in some]
        _write_units(storage, options, scratch, every)
        return _finish(storage, options, units, roles)


def _write_units(
    storage: Storage, options: ShardOptions, scratch: Path, units: Sequence[Unit]
) -> None:
    """Write what is missing of units, on a disk with locks whichever no other process writes."""
    place, of = (0, 1) if storage.folder else share(os.environ)
    with shown("writing shards", len(units[place::of])) as advance:

        def write(unit: Unit) -> None:
            _write_unit(storage, options, scratch, unit)
            advance(1)

        if storage.folder is not None:
            share_work(storage.folder, [(unit.name, partial(write, unit)) for unit in units])
            return
        for unit in units[place::of]:
            write(unit)


def _stream_units(
    split: str, source: StreamedSplit, options: ShardOptions, scratch: Path
) -> list[Unit]:
    """Return a unit for each file of a split that is streamed."""
    return [
        Unit(options.name(split, file, file_state(file)), partial(source.read, file, scratch))
        for file in source.files
    ]


def _manifest_units(split: str, manifest: Manifest, options: ShardOptions) -> list[Unit]:
    """Divide the clips of a manifest, in random order, into shards of about equal size.

    How much the audio takes is estimated from some clips, so that every process comes to the same
    division without reading all.
    """
    clips = Clips.of(manifest.clips)
    order = np.random.default_rng(options.seed).permutation(len(clips))
    facts = [_file_facts(path) for path in clips.paths]
    probed = order[:PROBED].tolist()
    paths = [clips[row].path for row in probed]
    decoded = decode_clips(paths, options.sample_rate, store=options.store)
    kept = sum(len(each.audio) for each in decoded if isinstance(each.audio, bytes))
    read = sum(facts[row][0] for row in probed)
    expected = sum(size for size, _ in facts) * kept / max(1, read)
    shards = max(1, min(round(expected / options.shard_bytes), len(clips)))  # none without a clip
    units = []
    for number, chosen in enumerate(np.array_split(order, shards)):
        some = clips.take(chosen)
        part = Manifest(some, manifest.bad_rows if number == 0 else ())
        content = [*some.own.to_pylist(), *some.columns.to_pylist()]
        name = options.name(split, part.bad_rows, [facts[row] for row in chosen.tolist()], content)
        units.append(Unit(name, partial(_from, [part])))
    return units


def _from(parts: Sequence[Manifest], start: int) -> Iterator[Manifest]:
    return iter(parts[start:])


def _file_facts(path: str) -> tuple[int, int]:
    """Return the size and time of change of a file, zeros where it cannot be reached."""
    try:
        status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _write_unit(storage: Storage, options: ShardOptions, scratch: Path, unit: Unit) -> None:
    """Write the shards of a unit, behind those that are there."""
    there = list(_finished(storage, unit))
    if there and there[-1].facts.last:
        return
    done = there[-1].facts.parts if there else 0
    parts = unit.parts(done)
    part = next(parts, None)
    for number in count(len(there)):
        with closing(ShardWriter(storage.folder or scratch)) as writer:
            clips, left_out = list[Clips](), list[tuple[str, str, str]]()
            while part is not None and writer.bytes < options.shard_bytes:
                some = Clips.of(part.clips)
                paths = map(Path, some.paths)
                kept, errors = writer.decode(
                    some.ids, paths, options.sample_rate, store=options.store
                )
                clips.append(some.take(kept))
                left_out += map(astuple, part.bad_rows)
                left_out += [(some.ids[n], UNREADABLE, str(why)) for n, why in errors.items()]
                part, done = next(parts, None), done + 1
            joined, name = Clips.join(clips), f"{unit.name}-{number:03d}"
            others = {free_name(n): joined.columns[n] for n in joined.columns.column_names}
            columns = {"id": joined.own["id"], "sentence": joined.own["sentence"], **others}
            last = part is None
            writer.publish(storage, name, columns, left_out=left_out, parts=done, last=last)
            logger.info(f"{name}: {len(joined)} clips, {writer.bytes / 1e6:.1f} MB")
        if last:
            return


class Finished(NamedTuple):
    """A shard that is there: its name, table and facts."""

    name: str
    table: pa.Table
    facts: ShardFacts


def _finished(storage: Storage, unit: Unit) -> Iterator[Finished]:
    """Yield the shards of a unit that are there, from the first on."""
    for number in count():
        name = f"{unit.name}-{number:03d}"
        there, size = storage.sizes([f"{name}.parquet", f"{name}.arrow"])
        if there is None:
            return
        table, facts = open_table(storage, name)
        if facts.bytes != (size or 0):
            return
        yield Finished(name, table, facts)
        if facts.last:
            return


def share(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return which process this is and of how many, by SLURM's array or torchrun's ranks.

    Raises:
        SbkitError: the variables are not as these set them.
    """
    array = {n: v for n, v in variables.items() if n.startswith("SLURM_ARRAY_TASK_")}
    try:
        if array:
            first, of = int(array["SLURM_ARRAY_TASK_MIN"]), int(array["SLURM_ARRAY_TASK_COUNT"])
            step = int(array.get("SLURM_ARRAY_TASK_STEP", "1"))
            place = (int(array["SLURM_ARRAY_TASK_ID"]) - first) // step
        else:
            place, of = int(variables.get("RANK", "0")), int(variables.get("WORLD_SIZE", "1"))
        if place >= of:
            raise ValueError(f"number {place} of {of}")
    except (KeyError, ValueError) as error:
        raise SbkitError(
            "The processes that share the work must have numbers without gaps, by "
            "SLURM_ARRAY_TASK_ID, _MIN and _COUNT, or by RANK and WORLD_SIZE, but this one has "
            f"{error}. Write --array=0-N, or unset them all."
        ) from error
    return place, of


def _finish(
    storage: Storage,
    options: ShardOptions,
    units: Mapping[str, Sequence[Unit]],
    roles: Mapping[str, Sequence[str]],
) -> Index | None:
    """Write the index where all shards are there; raises SbkitError where much is left out."""
    splits = dict[str, list[str]]()
    for split, some in units.items():
        shards = list[Finished]()
        for unit in some:
            shards += _finished(storage, unit)
            if not shards or not shards[-1].name.startswith(unit.name) or not shards[-1].facts.last:
                logger.info("Other processes still write; the last one writes the index.")
                return None
        splits[split] = [shard.name for shard in shards]
        lost = [Excluded(split, *each) for shard in shards for each in shard.facts.left_out]
        clips = sum(len(shard.table) for shard in shards)
        check_loss(split, lost, clips + len(lost))
        samples = sum(pc.sum(shard.table["samples"]).as_py() or 0 for shard in shards)
        hours = samples / options.sample_rate / 3600
        logger.info(f"{split}: {clips} clips, {hours:.2f} h, {plural(len(shards), 'shard')}")
        for reason, number in Counter(each.reason for each in lost).items():
            logger.info(f"{split}: {number} left out, {reason}")
    index = Index(options.sample_rate, roles, splits)
    folder = storage.folder
    with claimed(folder, INDEX, wait=True) if folder else nullcontext():
        write_index(storage, index)
        if folder:
            remove_leftovers(folder)
    return index
