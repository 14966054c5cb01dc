"""Read files that hold rows together with their audio: tars of WebDataset, parquet and Arrow.

They are read in batches, from a disk or a URL, because such a corpus may fit neither into memory
nor on the disk. `datasets` does not read the tars here: it takes a wrong header for the end of a
tar, and drops keys that none of the first five samples has.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Self

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.audio.io import SUFFIXES as AUDIO_SUFFIXES
from sbkit.base.errors import DataError
from sbkit.data.columns import USUAL_COLUMNS, find_columns, plain_name
from sbkit.data.filesystem import access_errors, iter_members, unpacking_errors
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.tables import (
    Table,
    TableOptions,
    collect_objects,
    join_tables,
    read_text_column,
    require_column,
    to_manifest,
)

MAX_BATCH_ROWS, MAX_BATCH_BYTES = 1000, 1 << 26  # in memory at a time
BUFFER_BYTES = 1 << 20  # per column of parquet; without a buffer, whole row groups are in memory
PATH_COLUMN = "path"  # the column of the path or name of audio

# Rows with PATH_COLUMN, and the bytes of the audio of each, None if the row has only a path.
Batch = tuple[Table, Sequence[bytes | None]]


@dataclass(frozen=True)
class AudioTable:
    """A file that holds rows together with their audio, described by plain values.

    file: a path or URL.
    version: its size and etag or time, from the listing that found the file.
    partition: the keys in the names of its folders, such as lang=de.
    rows: the numbers of the rows to read, from 1; None: all.
    """

    file: str
    version: str
    options: TableOptions
    partition: Mapping[str, str]
    rows: Sequence[int] | None = None

    def batches(self) -> Iterator[tuple[Manifest, list[bytes]]]:
        """Yield the rows in order, with paths as FILE::ROW/NAME, and the bytes of their audio."""
        file, options = self.file, self.options
        batches = _read_tar(file) if is_tar(file) else _read_arrow(file, options)
        # Times and paths refer to the file that the clip was cut from.
        options = options.without("start", "duration", "end")
        options = replace(options, columns={**options.columns, "path": PATH_COLUMN})
        file_name = file.rpartition("/")[2]
        chosen_lines = {*(self.rows or ())}
        for table, audio in _named_errors(file, batches):
            is_chosen = [self.rows is None or line in chosen_lines for line in table.lines]
            lines = [*compress(table.lines, is_chosen)]
            rows = table.rows.filter(pa.array(is_chosen, pa.bool_()))
            origins = zip(lines, read_text_column(rows, PATH_COLUMN), strict=True)
            names = (origin.rpartition("/")[2] or f"{file_name}-{line}" for line, origin in origins)
            paths = [f"{file}::{line}/{name}" for line, name in zip(lines, names, strict=True)]
            contents_by_path = zip(paths, compress(audio, is_chosen), strict=True)
            contents = {path: content for path, content in contents_by_path if content}

            def find_audio(path: str, contents: Mapping[str, bytes] = contents) -> str | Excluded:
                return path if path in contents else Excluded("", "no audio", f"{path} has none")

            manifest = Manifest.of(table.excluded)
            if paths:
                rows = rows.drop_columns(PATH_COLUMN).append_column(PATH_COLUMN, pa.array(paths))
                table = add_partition(replace(table, rows=rows, lines=lines), self.partition)
                manifest = to_manifest(table, options, find_audio)
            excluded = tuple(replace(row, id=f"{file_name} {row.id}") for row in manifest.excluded)
            yield replace(manifest, excluded=excluded), [contents[p] for p in manifest.paths]

    def texts(self) -> pa.Table:
        """Return all rows without their audio."""
        return add_partition(read_text_rows(self.file, self.options), self.partition).rows


def is_tar(file: str) -> bool:
    """Check whether a file is a tar, by its name."""
    return file.endswith((".tar", ".tar.gz", ".tgz"))


def _named_errors(file: str, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches; if reading fails, name the file and the last good row in the error."""
    line = 0
    while True:
        failure = f"cannot be read after row {line}"
        with (
            access_errors(file),
            unpacking_errors(file, failure, fix="Copy or write it again."),
        ):
            batch = next(batches, None)
        if batch is None:
            return
        line = max([line, *map(int, batch[0].lines)])
        yield batch


def add_partition(table: Table, partition: Mapping[str, str]) -> Table:
    """Add a column for each key of its folders that a table lacks."""
    rows = table.rows
    for name in partition.keys() - {*rows.column_names}:
        rows = rows.append_column(name, pa.array([partition[name]] * len(rows), pa.string()))
    return replace(table, rows=rows)


# ---- tars of WebDataset


class _CheckedMember(tarfile.TarInfo):
    """A member with a checked header: at a wrong header, tarfile would silently end the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and not any(buf):  # zeros mark the end
                raise
            raise tarfile.ReadError(f"{error}") from error


def _read_tar(file: str) -> Iterator[Batch]:
    rows: list[tuple[int, dict[str, Any] | Excluded]] = []
    audio: list[bytes] = []
    for number, (key, members) in enumerate(_read_samples(file), start=1):
        rows.append((number, _to_row(key, members, audio)))
        if len(rows) == MAX_BATCH_ROWS or sum(map(len, audio)) >= MAX_BATCH_BYTES:
            yield join_tables(collect_objects(file, iter(rows)), file), audio
            rows, audio = [], []
    yield join_tables(collect_objects(file, iter(rows)), file), audio


def _read_samples(file: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the name of each sample, and the bytes of its members by suffix."""
    last_key = ""
    sample: dict[str, bytes] = {}
    with (
        fsspec.open(file, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|*", tarinfo=_CheckedMember) as tar,
    ):
        for member in iter_members(tar):
            content = tar.extractfile(member)  # refuses links
            folder, slash, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if content is None or not stem:
                continue
            key = f"{folder}{slash}{stem}"
            if sample and key != last_key:
                yield last_key, sample
                sample = {}
            if suffix in sample:
                raise DataError(f"{file} has two members called {key}.{suffix}.")
            sample[suffix] = content.read()
            last_key = key
    if sample:
        yield last_key, sample


def _to_row(
    key: str, members: Mapping[str, bytes], audio: list[bytes]
) -> dict[str, Any] | Excluded:
    """Return the row of a sample, and append its audio."""
    suffixes = [name for name in members if f".{name}".lower().endswith(AUDIO_SUFFIXES)]
    if len(suffixes) != 1:
        reason = "several audio files" if suffixes else "no audio"
        return Excluded(key, reason, f"it consists of {', '.join(members)}")
    try:
        values = json.loads(members.get("json", b"{}"))
        if not isinstance(values, dict):
            raise TypeError("it is not an object with keys")
        if "txt" in members:
            values["txt"] = members["txt"].decode("utf-8-sig").strip()
    except (ValueError, TypeError) as error:
        return Excluded(key, "not a JSON object or UTF-8 text", str(error))
    audio.append(members[suffixes[0]])
    row = {k: v for k, v in values.items() if plain_name(k) not in USUAL_COLUMNS["path"]}
    return {**row, PATH_COLUMN: f"{key}.{suffixes[0]}"}


# ---- Parquet and Arrow


def _read_arrow(
    file: str, options: TableOptions, *, with_audio: bool = True, max_rows: int | None = None
) -> Iterator[Batch]:
    max_rows = max_rows or MAX_BATCH_ROWS

    def batch_rows(num_rows: int, num_bytes: int) -> int:
        return max(1, min(max_rows, num_rows * MAX_BATCH_BYTES // max(num_bytes, 1)))

    with fsspec.open(file, "rb") if "://" in file else pa.memory_map(file) as stream:
        if stream.read(4) == b"PAR1":
            parquet = pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
            groups = [parquet.metadata.row_group(n) for n in range(parquet.num_row_groups)]
            sizes = [batch_rows(group.num_rows, group.total_byte_size) for group in groups]
            audio, names = _find_columns(parquet.schema_arrow, options, file, with_audio)
            batches = parquet.iter_batches(min([*sizes, max_rows]), columns=[*audio, *names])
        else:
            stream.seek(0)
            try:
                batches = reader = pa.ipc.open_stream(stream)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(stream)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            audio, names = _find_columns(reader.schema, options, file, with_audio)
        line = 1
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            for part in rows.to_batches(batch_rows(len(rows), rows.nbytes)):
                table = _to_table(pa.Table.from_batches([part.select(names)]), file, line)
                cells = [
                    split_audio_cell(cell) for name in audio for cell in part[name].to_pylist()
                ]
                if audio:
                    paths = pa.array([path for _, path in cells], pa.string())
                    table = replace(table, rows=table.rows.append_column(PATH_COLUMN, paths))
                yield table, [content for content, _ in cells]
                line += len(part)


def _find_columns(
    schema: pa.Schema, options: TableOptions, file: str, with_audio: bool
) -> tuple[list[str], list[str]]:
    """Return the names of the audio column, and of the columns that do not describe audio.

    The audio column has the audio or its path; the list is empty unless ``with_audio``. A path
    beside embedded audio names the file that the audio came from.
    """
    origins = find_columns(schema.names, "path")
    embedded = [name for name in origins if not is_text(schema.field(name).type)]
    candidates = (embedded if "path" not in options.columns else []) or schema.names
    if with_audio:
        require_column(Table(file, schema.empty_table().select(candidates), []), options, "path")
    column = options.find(candidates, "path", file)
    return [column] * with_audio, [n for n in schema.names if n not in (column, *origins)]


def has_audio(file: str, options: TableOptions) -> bool:
    """Check whether the rows of a file contain audio, not only paths of files."""
    batches = _read_arrow(file, options, max_rows=10)
    _, audio = next(_named_errors(file, batches), (None, ()))
    return any(audio)


def read_paths(file: str, options: TableOptions) -> Table:
    """Read a file whose rows have paths of audio files."""
    batches = _named_errors(file, _read_arrow(file, options))
    table = join_tables((rows for rows, _ in batches), file)
    if not table.rows.column_names:
        raise DataError(f"{file} has no rows.", file=file)
    name = options.columns.get("path") or PATH_COLUMN
    return replace(table, rows=table.rows.rename_columns({PATH_COLUMN: name}))


def read_text_rows(file: str, options: TableOptions) -> Table:
    """Read the rows of a file without their audio."""
    batches = _named_errors(file, _read_arrow(file, options, with_audio=False))
    return join_tables((rows for rows, _ in batches), file)


def split_audio_cell(cell: Any) -> tuple[bytes | None, str]:
    """Return the bytes of the audio in a cell, None if it has none, and its path or name."""
    if isinstance(cell, Mapping):
        return cell.get("bytes"), cell.get("path") or ""
    if isinstance(cell, bytes):
        return cell, ""
    return None, cell if isinstance(cell, str) else ""


def is_text(type: pa.DataType) -> bool:
    """Check whether a column of this type holds texts, also as polars or a category has them."""
    type = type.value_type if pa.types.is_dictionary(type) else type
    return type in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def _to_table(rows: pa.Table, file: str, line: int) -> Table:
    """Return rows as texts, numbered from ``line``; drop columns of bytes, lists and the like."""
    columns: dict[str, pa.Array] = {}
    other_values: dict[str, tuple[int, object]] = {}
    rows = name_classes(rows)
    for name, values in zip(rows.column_names, rows.columns, strict=True):
        type = values.type
        if pa.types.is_floating(type):  # pandas writes NaN for missing values
            values = pc.if_else(pc.is_nan(values), None, values)
        if pa.types.is_primitive(type) or pa.types.is_decimal(type):
            first = pc.index(values.is_valid(), True).as_py()
            if first >= 0:
                other_values[name] = (line + first, values[first].as_py())
        elif not is_text(type):
            continue
        columns[name] = values.cast(pa.string()).fill_null("")
    lines = range(line, line + len(rows))
    return Table(file, pa.table(columns), lines, other_values=other_values)


def name_classes(rows: pa.Table) -> pa.Table:
    """Replace the numbers of a `datasets.ClassLabel` by the names of its classes."""
    if b"huggingface" in (rows.schema.metadata or {}):
        for name, feature in datasets.Features.from_arrow_schema(rows.schema).items():
            if isinstance(feature, datasets.ClassLabel):
                classes = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                texts = pc.take(pa.array(feature.names), classes)
                rows = rows.set_column(rows.column_names.index(name), name, texts)
    return rows
