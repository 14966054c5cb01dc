"""Write a corpus of shards, by any number of processes that share the work.

On a disk with locks each process takes what no other one holds; elsewhere it takes its share by
SLURM_ARRAY_TASK_ID or RANK. The index makes a corpus of the shards, and is written by the process
that finds all of them. A killed process loses its current shard.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, tee
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow.compute as pc

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clip, Clips
from sbkit.data.corpora.manifest import BadRow, Manifest, free_name
from sbkit.data.corpora.splits import Excluded
from sbkit.data.corpora.streamed_split import StreamedSplit
from sbkit.data.storage.audio_cache import DISK_FULL
from sbkit.data.storage.decode import Decoded, decode_clips
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.prepare import UNREADABLE, check_loss
from sbkit.data.storage.shard import (
    ShardFacts,
    ShardWriter,
    claimed,
    remove_leftovers,
    share_work,
)
from sbkit.data.storage.shard_units import ShardOptions, Unit, manifest_units
from sbkit.data.storage.sharded_corpus import (
    INDEX,
    Index,
    Listed,
    missing_shards,
    open_table,
    read_index,
    write_index,
)
from sbkit.logs.log import log

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)")
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
Source = Manifest | StreamedSplit


def parse_size(text: str) -> int:
    """Return a number of bytes written as 1GB; raises SbkitError."""
    found = SIZE.fullmatch(text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
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
        SbkitError: other shards are there, the place cannot be written to, a disk is full, or more
            of a split is left out than a run may do without.
    """
    if options.store == "none":
        raise SbkitError(
            f"`audio_store` of shards must be pcm or flac, but is {options.store}: they hold the "
            "audio. Pass --audio_store=flac."
        )
    if any(isinstance(each, Manifest) and each.stored is not None for each in sources.values()):
        raise SbkitError(
            "Shards must be made of audio files, but the data is in shards already. Name what "
            "they were made of, or copy them."
        )
    with _writing(storage), TemporaryDirectory() as folder:
        scratch = Path(folder)
        if storage.folder is not None:
            storage.folder.mkdir(parents=True, exist_ok=True)
        units = {
            split: _units(split, source, options, scratch) for split, source in sources.items()
        }
        if (there := _existing(storage, units, roles)) is not None:
            return there
        writer = _Writer(storage, options, scratch)
        writer.write([(split, unit) for split, some in units.items() for unit in some])
        return _finish(storage, options, units, roles)


def _units(split: str, source: Source, options: ShardOptions, scratch: Path) -> list[Unit]:
    if isinstance(source, StreamedSplit):
        (scratch / split).mkdir()
        return source.units(options, scratch / split)
    return manifest_units(source, options)


def _existing(
    storage: Storage, units: Mapping[str, Sequence[Unit]], roles: Mapping[str, Sequence[str]]
) -> Index | None:
    """Return the index where all that it names is there; raises SbkitError where it has others."""
    if storage.sizes([INDEX]) == [None]:
        return None
    index = read_index(storage)
    there = {split: _unit_names(shards) for split, shards in index.splits.items()}
    meant = {split: [f"{split}-{unit.key}" for unit in some] for split, some in units.items()}
    if (there, index.roles) != (meant, {role: list(names) for role, names in roles.items()}):
        raise SbkitError(
            f"{storage.url} must be empty or hold shards of the same data, made in the same way, "
            f"but its {INDEX} names others. Name another place, or remove that file."
        )
    missing = [each for shards in index.splits.values() for each in missing_shards(storage, shards)]
    return None if missing else index


def _unit_names(shards: Sequence[Listed]) -> list[str]:
    return list(dict.fromkeys(shard.name.rpartition("-")[0] for shard in shards))


@dataclass(frozen=True)
class _Writer:
    """One process's share of the work; ``scratch`` is a folder of its own."""

    storage: Storage
    options: ShardOptions
    scratch: Path

    def write(self, units: Sequence[tuple[str, Unit]]) -> None:
        """Write all units, or this process's share of them."""
        folder = self.storage.folder
        if folder is not None:
            works = [(unit.key, partial(self._write_unit, split, unit)) for split, unit in units]
            share_work(folder, works)
            return
        place, of = share(os.environ)
        for split, unit in units[place::of]:
            self._write_unit(split, unit)

    def _write_unit(self, split: str, unit: Unit) -> None:
        """Write the shards of a unit, behind those that are there."""
        there = list(finished(self.storage, split, unit))
        if there and there[-1].facts.last:
            return
        start = there[-1].facts.sources if there else 0
        part = self._begin(split, unit, len(there), start)
        try:
            for row, decoded in self._decode(unit.rows(start)):
                size = len(decoded.audio) if decoded and isinstance(decoded.audio, bytes) else 0
                full = part.audio.bytes + size > self.options.shard_bytes
                if unit.cut and full and part.audio.bytes:
                    part.finish(self.storage, last=False)
                    part = self._begin(split, unit, part.number + 1, part.sources)
                part.add(row, decoded)
            part.finish(self.storage, last=True)
        finally:
            part.audio.discard()

    def _begin(self, split: str, unit: Unit, number: int, sources: int) -> "NewShard":
        audio = ShardWriter(self.storage.folder or self.scratch)
        return NewShard(f"{split}-{unit.key}", number, audio, sources)

    def _decode(
        self, rows: Iterator[Clip | BadRow]
    ) -> Iterator[tuple[Clip | BadRow, Decoded | None]]:
        """Pair rows with their audio, which is decoded ahead; remove files that were made of it."""
        rows, ahead = tee(rows)
        paths = (row.path for row in ahead if isinstance(row, Clip))
        decoding = decode_clips(paths, self.options.sample_rate, store=self.options.store)
        for row in rows:
            if isinstance(row, BadRow):
                yield row, None
                continue
            yield row, next(decoding)
            if row.path.is_relative_to(self.scratch):
                shutil.rmtree(row.path.parent)


class NewShard:
    """One shard that is being written.

    Attributes:
        number: among the shards of its unit; sources: rows of the unit up to here.
    """

    def __init__(self, unit: str, number: int, audio: ShardWriter, sources: int) -> None:
        self.number, self.audio, self.sources = number, audio, sources
        self._name = shard_name(unit, number)
        self._clips: list[Clip] = []
        self._left_out: list[tuple[str, str, str]] = []

    def add(self, row: Clip | BadRow, decoded: Decoded | None) -> None:
        """Add a clip, or note why there is none."""
        self.sources += 1
        if isinstance(row, BadRow):
            self._left_out.append((row.id, row.reason, row.detail))
        elif decoded is None or isinstance(decoded.audio, AudioError):
            self._left_out.append((row.id, UNREADABLE, str(decoded and decoded.audio)))
        else:
            self.audio.add(row.id, decoded)
            self._clips.append(row)

    def finish(self, storage: Storage, *, last: bool) -> None:
        """Put the shard in its place."""
        clips = Clips.of(self._clips)
        others = {free_name(n): clips.columns[n] for n in clips.columns.column_names}
        columns = {"id": clips.own["id"], "sentence": clips.own["sentence"], **others}
        facts = {"left_out": self._left_out, "sources": self.sources, "last": last}
        self.audio.publish(storage, self._name, columns, **facts)
        log(f"{self._name}: {self.audio.clips} clips, {self.audio.bytes / 1e6:.1f} MB")


class Finished(NamedTuple):
    """A shard that is there: how the index lists it, and what its table says."""

    listed: Listed
    facts: ShardFacts


def shard_name(unit: str, number: int) -> str:
    """Return the name of the files of one shard of a unit, without their endings."""
    return f"{unit}-{number:03d}"


def finished(storage: Storage, split: str, unit: Unit) -> Iterator[Finished]:
    """Yield the shards of a unit that are there, from the first on."""
    for number in count():
        name = shard_name(f"{split}-{unit.key}", number)
        there, size = storage.sizes([f"{name}.parquet", f"{name}.arrow"])
        if there is None:
            return
        table, facts = open_table(storage, name)
        if facts.bytes != (size or 0):
            return
        samples = pc.sum(table["samples"]).as_py() or 0
        yield Finished(Listed(name, facts.bytes, len(table), samples), facts)
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
    except (KeyError, ValueError) as error:
        raise SbkitError(
            "The processes that share the work must know their number by SLURM_ARRAY_TASK_ID, _MIN "
            f"and _COUNT, or by RANK and WORLD_SIZE, but {error} is wrong. Set or unset them all."
        ) from error
    if place >= of:
        raise SbkitError(
            f"The tasks of an array must have numbers without gaps, but this is number {place} of "
            f"{of}. Write --array=0-{of - 1}."
        )
    return place, of


def _finish(
    storage: Storage,
    options: ShardOptions,
    units: Mapping[str, Sequence[Unit]],
    roles: Mapping[str, Sequence[str]],
) -> Index | None:
    """Write the index where all shards are there; raises SbkitError where much is left out."""
    splits: dict[str, list[Listed]] = {}
    for split, some in units.items():
        splits[split], lost = [], list[Excluded]()
        for unit in some:
            shards = list(finished(storage, split, unit))
            if not shards or not shards[-1].facts.last:
                log("Other processes still write; the last one writes the index.")
                return None
            splits[split] += [shard.listed for shard in shards]
            lost += [Excluded(split, *each) for shard in shards for each in shard.facts.left_out]
        reasons = Counter(each.reason for each in lost)
        clips = sum(shard.clips for shard in splits[split])
        check_loss(split, lost, reasons, clips + len(lost))
        for reason, number in reasons.items():
            log(f"{split}: {number} left out, {reason}")
    index = Index(options.sample_rate, options.store, roles, splits)
    folder = storage.folder
    with claimed(folder, INDEX, wait=True) if folder else nullcontext():
        write_index(storage, index)
        if folder:
            remove_leftovers(folder)
    return index


@contextmanager
def _writing(storage: Storage) -> Iterator[None]:
    """Raise one SbkitError where the disk is full or read-only."""
    try:
        yield
    except OSError as error:
        place = error.filename or storage.url
        if error.errno in DISK_FULL:
            raise SbkitError(
                f"The disk of {place} must have room for shards, but is full. Make room, or name "
                "another place. The shards that are finished stay, and the same command continues "
                "from there."
            ) from error
        raise SbkitError(
            f"{place} must be a place to write to, but is not: {error.strerror}. Choose another "
            "one."
        ) from error
