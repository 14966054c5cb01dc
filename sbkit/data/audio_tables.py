"""Files whose rows lie with their audio inside: tars of WebDataset, parquet and Arrow.

They are read in batches, here or at a URL: such a corpus may fit neither into memory nor on the
disk. `datasets` opens them, too, but needs torchcodec to hand out a row of a tar, and takes a file
in the working folder that is named like a member in its place.
"""

import json
import tarfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import IOBase
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.audio.io import SUFFIXES as AUDIO_SUFFIXES
from sbkit.audio.io import encode_audio, file_or_array, to_samples
from sbkit.base.errors import DataError
from sbkit.data.columns import USUAL_COLUMNS, find_columns, plain_name
from sbkit.data.filesystem import access_errors, iter_members, unpacking_errors
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.tables import (
    Table,
    TableOptions,
    collect_objects,
    is_missing,
    join_tables,
    to_manifest,
)

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_BATCH_ROWS, MAX_BATCH_BYTES = 1000, 1 << 26  # in memory at a time
BUFFER_BYTES = 1 << 20  # of a column of parquet; without it, all of a row group is in memory
PATH = "path"  # the column of FILE::NAME

Batch = tuple[Table, Mapping[str, bytes]]  # rows, and the bytes of their audio by path


@dataclass(frozen=True)
class AudioTable:
    """A file whose rows lie with their audio inside, as plain values.

    file: a path or URL.
    version: its size and etag or time, from the one listing that found it.
    partition: the keys in the names of its folders, such as lang=de.
    rows: those to take, sorted, from 0; None: all.
    """

    file: str
    version: str
    options: TableOptions
    partition: Mapping[str, str]
    rows: Sequence[int] | None = None

    def batches(self) -> Iterator[tuple[Manifest, list[bytes]]]:
        """Yield the rows in order, whose paths are FILE::NAME, and the bytes of their audio."""
        read = _read_tar if self.file.endswith(TAR_SUFFIXES) else _read_arrow
        # A time or a path is of the file that the clip was cut from.
        options = self.options.without("start", "duration", "end")
        options = replace(options, columns={**options.columns, "path": PATH})
        name = self.file.rpartition("/")[2]
        for table, contents in _named_errors(self.file, read(self)):

            def find_audio(path: str, contents: Mapping[str, bytes] = contents) -> str | Excluded:
                return path if path in contents else Excluded("", "no audio", f"{path} has none")

            manifest = Manifest.of(table.excluded)
            if len(table.rows):
                manifest = to_manifest(add_partition(table, self.partition), options, find_audio)
            excluded = tuple(replace(row, id=f"{name} {row.id}") for row in manifest.excluded)
            yield replace(manifest, excluded=excluded), [contents[p] for p in manifest.paths]

    def texts(self) -> Table:
        """Return all rows without their audio."""
        return add_partition(read_texts(self.file, self.options), self.partition)

    def choose(self, start: int, count: int) -> Sequence[int]:
        """Return which of ``count`` rows after ``start`` are taken, counted from there."""
        if self.rows is None:
            return range(count)
        first, end = (bisect_left(self.rows, position) for position in (start, start + count))
        return [row - start for row in self.rows[first:end]]


@contextmanager
def _reading(file: str, line: int = 0) -> Iterator[None]:
    failure = f"cannot be read after row {line}"
    with access_errors(file), unpacking_errors(file, failure, fix="Copy it again."):
        yield


def _named_errors(file: str, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches, and name the file and the last good row where it cannot be read."""
    line = 0  # of the last row
    while True:
        with _reading(file, line):
            batch = next(batches, None)
        if batch is None:
            return
        line = max([line, *map(int, batch[0].lines)])
        yield batch


def add_partition(table: Table, partition: Mapping[str, str]) -> Table:
    """Return a table with a column for each key of its folders that it has not."""
    rows = table.rows
    for name in partition.keys() - {*rows.column_names}:
        rows = rows.append_column(name, pa.array([partition[name]] * len(rows), pa.string()))
    return replace(table, rows=rows)


# Tars of WebDataset


class _CheckedMember(tarfile.TarInfo):
    """A member whose header is right: at a wrong or missing one, tarfile just ends."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and not any(buf):  # the mark of the end
                raise
            raise tarfile.ReadError(f"{error}") from error


def _read_tar(audio_table: AudioTable) -> Iterator[Batch]:
    file = audio_table.file
    rows: list[tuple[int, dict[str, Any] | Excluded]] = []
    contents: dict[str, bytes] = {}

    def batch() -> Batch:
        return join_tables(collect_objects(file, iter(rows)), file), contents

    size = 0
    for number, (key, members) in enumerate(_read_samples(file)):
        if not audio_table.choose(number, 1):
            continue
        row = _to_row(file, key, members)
        rows.append((number + 1, row))
        if not isinstance(row, Excluded):
            suffix = row[PATH].removeprefix(f"{file}::{key}.")
            contents[row[PATH]] = members[suffix]
            size += len(members[suffix])
        if len(rows) == MAX_BATCH_ROWS or size >= MAX_BATCH_BYTES:
            yield batch()
            rows, contents, size = [], {}, 0
    yield batch()


def _read_samples(file: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the name of each sample, and the bytes of its members by suffix."""
    with (
        fsspec.open(file, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|*", tarinfo=_CheckedMember) as tar,
    ):
        for key, named in groupby(_read_members(tar, file), key=lambda member: member[0]):
            sample: dict[str, bytes] = {}
            for _, suffix, content in named:
                if suffix in sample:
                    raise DataError(f"{file} has two members of the name {key}.{suffix}.")
                sample[suffix] = content
            yield key, sample


def _read_members(tar: tarfile.TarFile, file: str) -> Iterator[tuple[str, str, bytes]]:
    for member in iter_members(tar):
        if not member.isfile() and not member.isdir():
            raise DataError(
                f"{file} is not read: its member {member.name[:200]!r} is a link or a device. "
                "Write the tar by: tar --dereference --hard-dereference"
            )
        folder, slash, name = member.name.rpartition("/")
        key, _, suffix = name.partition(".")
        if key and (content := tar.extractfile(member)):
            yield f"{folder}{slash}{key}", suffix, content.read()


def _to_row(file: str, key: str, members: Mapping[str, bytes]) -> dict[str, Any] | Excluded:
    audio = [suffix for suffix in members if Path(f"_.{suffix}").suffix.lower() in AUDIO_SUFFIXES]
    if len(audio) != 1:
        reason = "several audio files" if audio else "no audio"
        return Excluded(key, reason, f"it consists of {', '.join(members)}")
    try:
        values = json.loads(members.get("json", b"{}"))
        if not isinstance(values, dict):
            raise TypeError("it is not an object with keys")
        if "txt" in members:
            values["txt"] = members["txt"].decode("utf-8-sig").strip()
    except (ValueError, TypeError) as error:
        return Excluded(key, "not a JSON object or UTF-8 text", str(error))
    row = {k: v for k, v in values.items() if plain_name(k) not in USUAL_COLUMNS["path"]}
    return {**row, PATH: f"{file}::{key}.{audio[0]}"}


# Parquet and Arrow


class ArrowFile(NamedTuple):
    """An open file of parquet or Arrow. ``read`` yields its rows, or only some columns."""

    schema: pa.Schema
    read: Callable[[Sequence[str] | None], Iterator[pa.Table]]


@contextmanager
def open_arrow(file: str, max_rows: int | None = None) -> Iterator[ArrowFile]:
    """Open a file whose rows are read in batches of bounded size."""
    max_rows = max_rows or MAX_BATCH_ROWS

    def batch_rows(num_rows: int, num_bytes: int) -> int:
        return max(1, min(max_rows, num_rows * MAX_BATCH_BYTES // max(num_bytes, 1)))

    with fsspec.open(file, "rb") if "://" in file else pa.memory_map(file) as stream:
        if stream.read(4) == b"PAR1":
            parquet = pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
            groups = [parquet.metadata.row_group(n) for n in range(parquet.num_row_groups)]
            sizes = [batch_rows(group.num_rows, group.total_byte_size) for group in groups]

            def read(names: Sequence[str] | None) -> Iterator[pa.Table]:
                for batch in parquet.iter_batches(min([*sizes, max_rows]), columns=names):
                    yield pa.Table.from_batches([batch])

            yield ArrowFile(parquet.schema_arrow, read)
            return
        stream.seek(0)
        try:
            reader = pa.ipc.open_stream(stream)
            batches: Iterable[pa.RecordBatch] = reader
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(stream)
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches))

        def read_batches(names: Sequence[str] | None) -> Iterator[pa.Table]:
            for batch in batches:
                table = pa.Table.from_batches([batch])
                size = batch_rows(len(table), table.nbytes)
                for start in range(0, len(table), size):
                    rows = table.slice(start, size)
                    yield rows if names is None else rows.select(names)

        yield ArrowFile(reader.schema, read_batches)


def find_audio_column(schema: pa.Schema, options: TableOptions, file: str) -> str:
    """Return the column of the audio, or of its path; "" without one.

    The path beside the audio of a dataset is that of its origin.
    """
    names = schema.names
    usual = [] if "path" in options.columns else find_columns(names, "path")
    return options.find([n for n in usual if not is_text(schema, n)] or names, "path", file)


def has_audio(file: str, options: TableOptions) -> bool:
    """Check whether the rows of a file have the audio itself, not only paths of files."""
    with _reading(file), open_arrow(file, max_rows=10) as arrow:
        column = find_audio_column(arrow.schema, options, file)
        if not column or is_text(arrow.schema, column):
            return False
        rows = next(arrow.read([column]), None)
        return rows is not None and any(read_audio(cell)[0] for cell in rows[column].to_pylist())


def read_paths(file: str, options: TableOptions) -> Table:
    """Read a file whose rows have paths of audio files."""
    with _reading(file), open_arrow(file) as arrow:
        column = find_audio_column(arrow.schema, options, file)

        def read() -> Iterator[pa.Table]:
            for rows in arrow.read(None):
                if column and not is_text(rows.schema, column):
                    paths = [read_audio(cell)[1] for cell in rows[column].to_pylist()]
                    others = {*find_columns(rows.schema.names, "path")}
                    rows = rows.drop_columns([*others | {column}])
                    rows = rows.append_column(column, pa.array(paths, pa.string()))
                yield rows

        return join_tables(_to_tables(read(), file), file)


def read_texts(file: str, options: TableOptions) -> Table:
    """Read the rows of a file without their audio."""
    with _reading(file), open_arrow(file) as arrow:
        audio = find_audio_column(arrow.schema, options, file)
        names = [name for name in arrow.schema.names if name != audio]
        return join_tables(_to_tables(arrow.read(names), file), file)


def _read_arrow(audio_table: AudioTable) -> Iterator[Batch]:
    file, options = audio_table.file, audio_table.options
    with open_arrow(file) as arrow:
        column = find_audio_column(arrow.schema, options, file)
        origins = {column, *find_columns(arrow.schema.names, "path")}
        start = 0
        for rows in arrow.read(None):
            chosen = audio_table.choose(start, len(rows))
            lines = [start + index + 1 for index in chosen]
            start += len(rows)
            if len(chosen) < len(rows):
                rows = rows.take(pa.array(chosen, pa.int64()))
            contents: dict[str, bytes] = {}
            paths: list[str] = []
            for line, cell in zip(lines, rows[column], strict=True):
                content, name = read_audio(cell.as_py())
                paths.append(f"{file}::{line}/{name.rpartition('/')[2]}".rstrip("/"))
                if content:
                    contents[paths[-1]] = content
            rows = rows.drop_columns([*origins]).append_column(PATH, pa.array(paths, pa.string()))
            (table,) = _to_tables([rows], file)
            yield replace(table, lines=lines), contents


def read_audio(cell: Any) -> tuple[bytes | None, str]:
    """Return the bytes of a cell's audio, None without any, and its path or name."""
    if isinstance(cell, bytes):
        return cell, ""
    if isinstance(cell, Mapping):
        return cell.get("bytes"), cell.get("path") or ""
    return None, cell if isinstance(cell, str) else ""


def to_file(audio: Any) -> str | dict[str, Any]:
    """Return the absolute path of audio, or its content as `datasets` stores it."""
    source, rate = file_or_array(audio)
    if isinstance(source, str | Path):
        return str(source) if "://" in str(source) else str(Path(source).absolute())
    if rate is not None:
        source = encode_audio(to_samples(source), rate, "WAV")
    elif isinstance(source, IOBase):
        source = source.read()
    name = audio.get("path") if isinstance(audio, Mapping) and rate is None else None
    return {"bytes": source, "path": name}


def is_text(schema: pa.Schema, name: str) -> bool:
    """Check whether a column has texts of any type: of polars, pandas or a category, too."""
    type = schema.field(name).type
    type = type.value_type if pa.types.is_dictionary(type) else type
    return type in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def _to_tables(batches: Iterable[pa.Table], file: str) -> Iterator[Table]:
    """Yield rows of Arrow as texts, numbered from 1, without columns of bytes, lists or others."""
    first = 1
    for rows in map(name_classes, batches):
        columns: dict[str, pa.Array] = {}
        other_values: dict[str, tuple[int, object]] = {}
        for name in rows.schema.names:
            type = rows.schema.field(name).type
            if is_text(rows.schema, name):
                columns[name] = rows[name].cast(pa.string()).fill_null("")
            elif pa.types.is_primitive(type) or pa.types.is_decimal(type):
                values = [None if is_missing(v) else v for v in rows[name].to_pylist()]
                for row, value in enumerate(values, start=first):
                    if value is not None:
                        other_values.setdefault(name, (row, value))
                texts = ["" if value is None else str(value) for value in values]
                columns[name] = pa.array(texts, pa.string())
        lines = range(first, first + len(rows))
        yield Table(file, pa.table(columns), lines, other_values=other_values)
        first += len(rows)


def name_classes(rows: pa.Table) -> pa.Table:
    """Replace the numbers of a `datasets.ClassLabel` by the names of its classes."""
    if b"huggingface" in (rows.schema.metadata or {}):
        features = datasets.Features.from_arrow_schema(rows.schema)
        for name, feature in features.items():
            if isinstance(feature, datasets.ClassLabel) and name in rows.column_names:
                classes = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                texts = pc.take(pa.array(feature.names), classes)
                rows = rows.set_column(rows.column_names.index(name), name, texts)
    return rows
