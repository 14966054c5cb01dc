"""Datasets saved by ``datasets.save_to_disk`` and parquet files, with their audio or its paths."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.data.corpora.tables import Table, join_tables
from sbkit.data.storage.audio_cache import (
    EMBEDDED_FOLDER,
    default_cache,
    describe_folder,
)
from sbkit.data.storage.filesystem import writing

MARKS = ("state.json", "dataset_dict.json")
ROWS_AT_ONCE = 100  # in memory, with the audio that they hold

Save = Callable[[bytes, str], Path]  # writes the bytes of an audio file under a name


def is_saved_dataset(source: Path) -> bool:
    """Check for what ``save_to_disk`` writes, or a parquet file."""
    return source.suffix == ".parquet" or any((source / mark).is_file() for mark in MARKS)


def read_saved_dataset(source: Path) -> Table:
    """Return the rows as texts, without decoding audio; an audio column becomes its path.

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
    within = source / "data" if source.is_dir() else source  # paths are relative to its folder
    save = partial(_write_embedded, source)
    try:
        if source.is_file():
            batches: Iterator[pa.Table] = pq.ParquetFile(source).iter_batches(ROWS_AT_ONCE)
        else:
            dataset = datasets.load_from_disk(str(source)).with_format("arrow")
            batches = dataset.iter(ROWS_AT_ONCE)
        table = join_tables((to_table(batch, within, save) for batch in batches), within)
    except SbkitError:
        raise
    except Exception as error:  # damage, or types that are none, end in errors of many kinds
        raise SbkitError(
            f"{source} must be a dataset that `datasets` reads, but fails ({type(error).__name__}: "
            f"{str(error)[:200]}). Save it again."
        ) from error
    return Table(within, table.rows, range(1, len(table.rows) + 1))


def to_table(rows: pa.Table | pa.RecordBatch, file: Path, save: Save, first: int = 1) -> Table:
    """Return rows as texts; audio becomes its path, and that of a file where it is held in bytes.

    The numbers of `datasets.ClassLabel` become names, "" for -1, no class. Rows are counted from
    ``first``.
    """
    if b"huggingface" in (rows.schema.metadata or {}):
        kinds = datasets.Features.from_arrow_schema(rows.schema)
        for place, (name, kind) in enumerate(kinds.items()):
            if isinstance(kind, datasets.ClassLabel):
                known = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                rows = rows.set_column(place, name, pc.take(pa.array(kind.names), known))
    columns = {
        name: pa.array([_as_text(value, save) for value in rows[name].to_pylist()], pa.string())
        for name in rows.schema.names
    }
    return Table(file, pa.table(columns), range(first, first + len(rows)))


def _as_text(value: object, save: Save) -> str:
    if isinstance(value, bytes):
        value = {"path": None, "bytes": value}
    if isinstance(value, Mapping) and {"path", "bytes"} <= value.keys():
        path, content = str(value["path"] or ""), value["bytes"]
        return path if content is None else str(save(content, path))
    return "" if value is None else str(value)


def embedded_folder(source: Path) -> Path:
    """Return the folder of the cache for the audio that a dataset holds itself."""
    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:12]
    return default_cache() / EMBEDDED_FOLDER / f"{source.name}-{key}"


def file_in(folder: Path, content: bytes, path: str) -> Path:
    """Return where in a folder the bytes of an audio file are written.

    The name is the one that the dataset gives, or a hash, in a folder of its own: the clip's id is
    made of it.
    """
    digest, name = hashlib.sha256(content).hexdigest()[:16], Path(path).name
    return folder / digest[:2] / digest / (name if name not in ("", "..") else digest)


def _write_embedded(source: Path, content: bytes, path: str) -> Path:
    """Write the bytes of one audio file into the cache, unless they are there."""
    folder = embedded_folder(source)
    file = file_in(folder, content, path)
    if not file.is_file():
        with writing(folder):
            file.parent.mkdir(parents=True, exist_ok=True)
            describe_folder(folder, source.resolve())
            write_bytes_atomically(file, content)
    return file
