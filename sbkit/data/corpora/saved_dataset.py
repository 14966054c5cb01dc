"""Datasets saved by ``datasets.save_to_disk`` and parquet files, with their audio or its paths."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import datasets
import pyarrow as pa

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.data.corpora.parquet import ROWS_AT_ONCE, ParquetFile, with_class_names
from sbkit.data.corpora.tables import Table, TableRow
from sbkit.data.storage.audio_cache import (
    EMBEDDED_FOLDER,
    default_cache,
    describe_folder,
    note_use,
)

MARKS = ("state.json", "dataset_dict.json")
LARGEST = 1 << 26  # bytes of what describes a dataset
LONGEST_NAME = 200  # bytes of at most 255


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
    if source.is_dir():
        _refuse_strange_files(source)
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
        file = ParquetFile(source, size=source.stat().st_size)
        return file.schema.names, file.batches()
    dataset = datasets.load_from_disk(str(source)).with_format("arrow")
    return dataset.column_names, map(with_class_names, dataset.iter(ROWS_AT_ONCE))


def _refuse_strange_files(source: Path) -> None:
    """Refuse pipes, devices, links, and data that lies elsewhere; raises SbkitError."""
    contents = [
        read_regular(source / name, largest=LARGEST, what="A file of a saved dataset")
        for name in ("state.json", "dataset_info.json")
    ]
    try:
        names = [str(each["filename"]) for each in json.loads(contents[0])["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SbkitError(
            f"state.json of {source} must list the files of the dataset, but does not. Save the "
            "dataset again."
        ) from error
    with os.scandir(source) as entries:
        files = {each.name for each in entries if each.is_file(follow_symlinks=False)}
    for name in names:
        if name not in files:
            raise SbkitError(
                f"A saved dataset must consist of files in its folder, but {source} names "
                f"{name[:200]}, which is none. Save it again."
            )


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


def short_hash(content: bytes) -> str:
    """Return 16 digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def file_name(path: str, content: bytes) -> str:
    """Return the name that a path gives to a file, or a hash of its content where it gives none."""
    name = Path(path).name
    usable = (
        name.isprintable() and name not in ("", "..") and len(os.fsencode(name)) <= LONGEST_NAME
    )
    return name if usable else short_hash(content)


def write_embedded(content: bytes, name: str, source: Path) -> Path:
    """Write the bytes of one audio file, unless they are there, and return where.

    The name is the one that the dataset gives, in a folder of its own: the clip's id is made of it.

    Raises:
        SbkitError: the cache cannot be written, or its disk is full.
    """
    folder = embedded_folder(source)
    digest = short_hash(content)
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
