"""Divide the work of preparing a corpus into units, which any process can write.

manifests and tables -> units of plain values -> write(unit) -> shards

A unit has the clips of some files, or a table with audio. Its name follows from all inputs of its
shards, so a unit that is already written is not written again.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain, count, groupby, pairwise
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import LocalFileSystem

from sbkit.audio.io import AudioSpan, decoding_versions
from sbkit.base.errors import DataError
from sbkit.base.machine import usable_cores
from sbkit.base.messages import plural
from sbkit.base.workers import ThreadPool, begin_work, start_processes
from sbkit.data.audio_tables import AudioTable
from sbkit.data.clip_decoding import order_by_file
from sbkit.data.filesystem import Storage, disk_errors, map_ahead
from sbkit.data.manifest import SPAN_COLUMNS, STORED_COLUMN, Manifest, hash_texts
from sbkit.data.shard import AUDIO, FileStamp, ShardWriter, span_key
from sbkit.data.tables import TableOptions
from sbkit.logs.progress import progress_bar

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

NUM_DIGITS = 16  # of a digest in a name
SHARD_BYTES = 10**9  # the most audio in a shard, except for a single long recording
LAST_SHARD_SUFFIX = "-last"  # ends the name of the last shard of a unit
MIN_CLIPS_FOR_PROCESSES = 500  # starting a process takes as long as decoding 200 clips
MAX_PREPARING_PROCESSES = 64  # each takes 0.1 GB
FILES_SCHEMA = pa.schema(
    {"path": pa.large_binary(), "file_size": pa.int64(), "file_time": pa.int64()}
)
STAT_BLOCK, NUM_STAT_THREADS = 1000, 32  # threads wait for a disk, perhaps over a network
KEY_SEPARATOR = b"\0"  # between a path and a position, which identify a clip

Unit = dict[str, Any]  # a `WorkUnit` and its target as plain values, for another machine
RowBlocks = Mapping[str, Iterable[Manifest | AudioTable]]  # by split


def short_digest(content: object) -> str:
    """Return a digest of plain data, to be used in names."""
    text = json.dumps(content, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]


# ---- planning


@dataclass(frozen=True)
class WorkUnit:
    """The content of a unit: clips in files, or a table with audio.

    Without either, it is a template, with the facts that all units of a corpus share.
    """

    split: str
    sample_rate: int  # Hz
    store: str
    clips: Sequence[AudioSpan] = ()
    table: AudioTable | None = None

    @classmethod
    def of(cls, unit: Unit) -> "WorkUnit":
        values = json.loads(unit["work"])
        values["clips"] = [AudioSpan(*clip) for clip in values["clips"]]
        if table := values["table"]:
            values["table"] = AudioTable(**{**table, "options": TableOptions(**table["options"])})
        return cls(**values)

    def to_unit(self, out: str) -> Unit:
        return {"out": out, "clips": len(self.clips), "work": json.dumps(asdict(self))}

    @cached_property
    def stamps(self) -> Mapping[str, FileStamp]:
        """The present size and time of each file."""
        paths = [*dict.fromkeys(clip.path for clip in self.clips)]
        files = stat_files(pa.array(map(os.fsencode, paths), pa.large_binary()))
        stamps = map(FileStamp, files["file_size"].to_pylist(), files["file_time"].to_pylist())
        return dict(zip(paths, stamps, strict=True))

    @cached_property
    def name(self) -> str:
        """The start of the names of its shards."""
        return f"{self.split}-{short_digest([asdict(self), self.stamps, decoding_versions()])}"


def plan_units(
    row_blocks: RowBlocks, template: WorkUnit, out: str, unit_clips: int
) -> Iterator[Unit]:
    """Yield the units of all splits; clips are dealt to units by a hash of the path of their file.

    So a new clip changes only one unit. Audio files are not read.

    template: a work unit without content.
    unit_clips: the most clips in a unit, unless a file has more.
    """
    seen = np.empty(0, np.int64)  # hashes: a clip in two splits is decoded once
    for split, items in row_blocks.items():
        blocks: list[Manifest] = []
        for item in items:
            if isinstance(item, AudioTable):
                yield replace(template, split=split, table=item).to_unit(out)
            elif STORED_COLUMN not in item.rows.column_names:
                hashes = hash_texts(clip_keys(item))
                blocks.append(item.filter(~np.isin(hashes, seen)))
                seen = np.concatenate([seen, hashes])
        manifest = Manifest.join(blocks)
        num_units = 1 << ((len(manifest) - 1) // unit_clips).bit_length() if len(manifest) else 0
        paths = manifest.rows[AUDIO].to_pylist()
        # The common beginning of all paths is ignored, so that a moved corpus has the same units.
        extremes = (min(paths), max(paths)) if paths else ()
        folders = [path.rpartition(b"/")[0] for path in extremes]
        is_local = all(folder.startswith(b"/") for folder in folders)
        prefix_length = len(os.path.commonpath(folders)) if folders and is_local else 0
        names = (path[prefix_length:].lstrip(b"/") for path in paths)
        hashes = np.fromiter(map(zlib.crc32, names), np.int64, len(paths))
        unit_of_row = hashes % max(1, num_units)
        order = np.argsort(unit_of_row, kind="stable")
        manifest = manifest.take(order)
        ends = np.flatnonzero(np.diff(unit_of_row[order], append=-1)) + 1
        for start, end in pairwise([0, *ends.tolist()]):
            spans = [*Manifest(manifest.rows.slice(start, end - start)).spans]
            clips = [spans[index] for index in order_by_file(spans)]
            yield replace(template, split=split, clips=clips).to_unit(out)


# ---- writing


def write(unit: Unit) -> Unit:
    """Write the shards of a unit unless they exist; return its name and number of clips."""
    storage, work = Storage(unit["out"]), WorkUnit.of(unit)
    if not list_shards(storage, work.name).get(work.name):
        with TemporaryDirectory() as scratch, disk_errors(storage.folder or scratch):
            if storage.folder is not None:
                storage.folder.mkdir(parents=True, exist_ok=True)
            _write_shards(storage, storage.folder or Path(scratch), work)
    return {"unit": work.name, "clips": unit["clips"]}


def write_units(units: Sequence[Unit], title: str) -> None:
    """Write units on all cores; ``title`` names the progress bar."""
    num_clips = sum(unit["clips"] for unit in units)
    processes = min(usable_cores(), MAX_PREPARING_PROCESSES, len(units))
    is_small = num_clips < MIN_CLIPS_FOR_PROCESSES and all(unit["clips"] for unit in units)
    executor = None
    if processes > 1 and not is_small:
        executor = start_processes("decoding audio", partial(_make_executor, processes))
    with progress_bar(title, max(num_clips, len(units))) as advance:
        if executor is None:
            for unit in units:
                advance(write(unit)["clips"] or 1)
            return
        from loky.process_executor import BrokenProcessPool

        try:
            for written in map_ahead(executor, write, units, ahead=2 * processes):
                advance(written["clips"] or 1)
        except BrokenProcessPool as error:
            raise DataError(
                f"One of the {processes} processes that decode audio was killed, perhaps because "
                "memory ran out."
            ) from error


def _make_executor(processes: int) -> "ProcessPoolExecutor":
    # Threads would not help: PyAV holds Python's lock between packets, so two threads decode no
    # faster than one. The pool of multiprocessing would import the main module again.
    from loky import get_reusable_executor

    return get_reusable_executor(processes, initializer=begin_work, initargs=(os.getpid(),))


def _write_shards(storage: Storage, folder: Path, work: WorkUnit) -> None:
    additions = _additions(work)
    addition = next(additions, None)
    for number in count():
        with closing(ShardWriter(folder, work.sample_rate, work.store)) as writer:
            rows: list[pa.Table] = []
            while addition is not None and writer.audio_bytes < SHARD_BYTES:
                rows += addition(writer)
                addition = next(additions, None)
            is_whole_unit = number == 0 and addition is None
            if is_whole_unit and work.clips and not len(writer):
                paths = [*dict.fromkeys(clip.path for clip in work.clips)]
                raise DataError(
                    f"None of {plural(len(paths), 'file')} can be read, such as {paths[0]}, so "
                    f"{work.name} is not written."
                )
            columns = pa.concat_tables(rows, promote_options="default") if rows else None
            writer.publish(storage, name_shard(work.name, number, addition is None), columns)
        if addition is None:
            return


def _additions(work: WorkUnit) -> Iterator[Callable[[ShardWriter], list[pa.Table]]]:
    """Yield functions that add the clips of a file or a batch to a shard, and return their rows."""
    if work.table is not None:
        for manifest, contents in work.table.batches():
            yield partial(_add_rows, manifest, contents)
    for (path, _), clips in groupby(work.clips, key=lambda clip: (clip.path, clip.channel)):
        yield partial(_add_clips, [*clips], work.stamps[path])


def _add_clips(clips: Sequence[AudioSpan], stamp: FileStamp, writer: ShardWriter) -> list[pa.Table]:
    writer.add(clips, stamp)
    return []


def _add_rows(manifest: Manifest, contents: Sequence[bytes], writer: ShardWriter) -> list[pa.Table]:
    for clip, content in zip(manifest.spans, contents, strict=True):
        writer.add([clip], FileStamp(len(content), 0), content)
    writer.leave_out(manifest.excluded)
    names = [name for name in manifest.rows.column_names if name not in (AUDIO, *SPAN_COLUMNS)]
    excluded_ids = pa.array([row.id for row in manifest.excluded], pa.string())
    return [manifest.rows.select(names), pa.table({"id": excluded_ids})]


# ---- existing shards and files


def list_shards(storage: Storage, prefix: str = "") -> dict[str, list[str]]:
    """Return the names of the shards of each unit, sorted; [] for an incomplete unit."""
    shards: dict[str, list[str]] = {}
    for name in sorted(storage.find(prefix, ".parquet")):
        shard = name.removesuffix(".parquet")
        shards.setdefault(unit_of(shard), []).append(shard)
    return {
        unit: unit_shards if unit_shards[-1] == name_shard(unit, len(unit_shards) - 1, True) else []
        for unit, unit_shards in shards.items()
    }


def name_shard(unit: str, number: int, is_last: bool) -> str:
    """Return the name of a shard of a unit; shards are numbered from 0.

    >>> name_shard("train-0123456789abcdef", 1, is_last=True)
    'train-0123456789abcdef-001-last'
    """
    return f"{unit}-{number:03d}{LAST_SHARD_SUFFIX if is_last else ''}"


def unit_of(shard: str) -> str:
    """Return the name of a shard's unit.

    >>> unit_of("train-0123456789abcdef-001-last")
    'train-0123456789abcdef'
    """
    return shard.removesuffix(LAST_SHARD_SUFFIX).rpartition("-")[0]


def stat_files(paths: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the present size and time of files at distinct paths, as FILES_SCHEMA.

    A file that cannot be reached has the size -1, a URL the size 0.
    """
    blocks = (paths[i : i + STAT_BLOCK].to_pylist() for i in range(0, len(paths), STAT_BLOCK))
    with ThreadPool(NUM_STAT_THREADS) as pool:
        stamps = [*chain.from_iterable(map_ahead(pool, _stat_batch, blocks))]
    sizes, times = np.array(stamps, np.int64).reshape(-1, 2).T
    return pa.table([paths.cast(pa.large_binary()), sizes, times], schema=FILES_SCHEMA)


def _stat_batch(names: Sequence[bytes]) -> list[tuple[int, int]]:
    try:
        # Threads of `os.stat` fight for Python's lock: 19 CPU seconds for a million, here 5.
        files = LocalFileSystem().get_file_info([name.decode() for name in names])
    except (ValueError, OSError):  # a name is not UTF-8, or looks like a URL
        return [*map(_stat_file, names)]
    return [(file.size, file.mtime_ns) if file.is_file else (-1, 0) for file in files]


def _stat_file(name: bytes) -> tuple[int, int]:
    try:
        status = os.stat(name)  # noqa: PTH116 - Path does not take bytes
    except (OSError, ValueError):  # ValueError: a null character in the name
        return (0, 0) if b"://" in name else (-1, 0)
    return (status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else (-1, 0)


def clip_keys(manifest: Manifest) -> pa.ChunkedArray:
    """Return the key of each clip: the path of its file and its position there."""
    paths = manifest.rows[AUDIO].cast(pa.large_binary())
    if not manifest.has_spans:
        return paths
    positions = pa.array([*map(span_key, manifest.spans)], pa.string())
    return join_keys(paths, pa.chunked_array([positions]))


def join_keys(paths: pa.ChunkedArray, positions: pa.ChunkedArray) -> pa.ChunkedArray:
    """Join paths of files and positions in them to keys of clips; "" stands for a whole file."""
    separator = pa.scalar(KEY_SEPARATOR, pa.large_binary())
    joined = pc.binary_join_element_wise(paths, positions.cast(pa.large_binary()), separator)
    return pc.if_else(pc.equal(positions, ""), paths, joined)
