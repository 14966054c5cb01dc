"""Datasets saved by ``datasets.save_to_disk`` and parquet files, with their audio or its paths."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.data.corpora.tables import Table, TableRow
from sbkit.data.storage.audio_cache import (
    EMBEDDED_FOLDER,
    default_cache,
    describe_folder,
    note_use,
)

MARKS = ("state.json", "dataset_dict.json")
ROWS_AT_ONCE = 100  # in memory, with the audio that they hold


def is_saved_dataset(source: Path) -> bool:
    """Check for what ``save_to_disk`` writes, or a parquet file."""
    return source.suffix == ".parquet" or any((source / mark).is_file() for mark in MARKS)


def read_saved_dataset(source: Path) -> Table:
    """Return the rows as a table, without decoding audio; an audio column becomes its path.

    Audio that the dataset holds itself is written to files in the cache.

    Raises:
        SbkitError: it cannot be read, or has several splits.
    """
    if (source / "dataset_dict.json").is_file():
        names = sorted(each.name for each in source.iterdir() if each.is_dir())
        raise SbkitError(
            f"A manifest must be one split, but {source} holds {', '.join(names)}. Name one of "
            f"them, as {source / names[0] if names else source}."
        )
    datasets.disable_progress_bars()
    try:
        columns, tables = _open(source)
        stored = (row for table in tables for row in table.to_pylist())
        rows = tuple(
            TableRow(number, {name: _as_text(source, value) for name, value in row.items()})
            for number, row in enumerate(stored, start=1)
        )
    except SbkitError:
        raise
    except Exception as error:  # damage, or types that are none, end in errors of many kinds
        raise SbkitError(
            f"{source} must be a dataset that `datasets` reads, but fails ({type(error).__name__}: "
            f"{str(error)[:200]}). Save it again."
        ) from error
    note_use(embedded_folder(source))
    within = source / "data" if source.is_dir() else source  # paths are relative to its folder
    return Table(within, tuple(columns), rows)


def _open(source: Path) -> tuple[Sequence[str], Iterable[pa.Table | pa.RecordBatch]]:
    """Return the columns and some rows after the other, as stored: no column is decoded."""
    if source.is_file():
        file = pq.ParquetFile(source)
        return file.schema_arrow.names, parquet_batches(file)
    dataset = datasets.load_from_disk(str(source)).with_format("arrow")
    return dataset.column_names, map(with_class_names, dataset.iter(ROWS_AT_ONCE))


def parquet_batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield some rows of a file at a time, with the audio that they hold."""
    return map(with_class_names, file.iter_batches(ROWS_AT_ONCE))


def with_class_names(rows: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Return rows in which the numbers of `datasets.ClassLabel` are names, "" for -1, no class."""
    if b"huggingface" not in (rows.schema.metadata or {}):
        return rows
    for place, (name, kind) in enumerate(datasets.Features.from_arrow_schema(rows.schema).items()):
        if isinstance(kind, datasets.ClassLabel):
            known = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
            rows = rows.set_column(place, name, pc.take(pa.array(kind.names), known))
    return rows


def _as_text(source: Path, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        value = {"path": None, "bytes": value}
    if isinstance(value, dict) and "path" in value and "bytes" in value:
        path = str(value["path"] or "")
        content = value["bytes"]
        return str(write_embedded(content, path, source)) if content is not None else path
    return str(value)


def embedded_folder(source: Path) -> Path:
    """Return the folder of the cache for the audio that a dataset holds itself."""
    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:12]
    return default_cache() / EMBEDDED_FOLDER / f"{source.name}-{key}"


def file_name(path: str, content: bytes) -> str:
    """Return the name that a path gives to a file, or a hash of its content where it gives none."""
    name = Path(path).name
    return name if name not in ("", "..") else _short_hash(content)


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write_embedded(content: bytes, name: str, source: Path) -> Path:
    """Write the bytes of one audio file, unless they are there, and return where.

    The name is the one that the dataset gives, in a folder of its own: the clip's id is made of it.

    Raises:
        SbkitError: the cache cannot be written, or its disk is full.
    """
    folder = embedded_folder(source)
    digest = _short_hash(content)
    file = folder / digest[:2] / digest / file_name(name, content)
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            describe_folder(folder, source.resolve())
            write_bytes_atomically(file, content)
        except OSError as error:
            raise SbkitError(
                f"The audio of {source} must be written to {folder}, but that fails "
                f"({error.strerror}). Make room, or let SBKIT_CACHE name another folder."
            ) from error
    return file
