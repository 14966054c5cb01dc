"""A split that is streamed: parquet or JSON Lines, in a folder or at a URL.

It is read row by row into shards, and never in memory or on the disk as a whole.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clip
from sbkit.data.corpora.manifest import BadRow
from sbkit.data.corpora.own_manifest import in_file, read_rows, with_language
from sbkit.data.corpora.saved_dataset import file_name, parquet_batches
from sbkit.data.corpora.tables import (
    PATH_COLUMNS,
    Table,
    TableRow,
    column_names,
    find_column,
    read_objects,
)
from sbkit.data.storage.filesystem import MissingFileError, Storage
from sbkit.data.storage.shard_units import ShardOptions, Unit

SUFFIXES = (".parquet", ".jsonl")
SHUFFLED = 1000  # rows of a file that are shuffled in memory; as MP3 of 5 s they are 40 MB


@dataclass(frozen=True)
class StreamedSplit:
    """Files that are read as they come; columns and language are as `read_manifests` takes them."""

    files: tuple[str, ...]
    path_column: str | None
    text_column: str | Literal[False] | None
    language: str

    def units(self, options: ShardOptions, scratch: Path) -> list[Unit]:
        """Return a unit for each file; audio that files hold is put into ``scratch`` for a moment.

        Raises:
            SbkitError: a file is not there. One that cannot be read, or lacks a column, is refused
                when it is its turn.
        """
        return [self._unit(file, options, scratch) for file in self.files]

    def _unit(self, file: str, options: ShardOptions, scratch: Path) -> Unit:
        def rows(start: int) -> Iterator[Clip | BadRow]:
            stored = _read(file)
            first = list(islice(stored, SHUFFLED))
            if not first:  # a file without rows, as Spark writes them
                return
            columns = column_names(Path(file), first)
            audio = find_column(
                Table(Path(file), columns, ()), self.path_column, PATH_COLUMNS, "path_column"
            )
            shuffled = islice(_shuffle(chain(first, stored), options.seed), start, None)
            content = (_with_path(row, audio, file, scratch) for row in shuffled)
            table = Table(Path(file), columns, content)
            for row in read_rows(table, self.path_column, self.text_column):
                yield with_language(in_file(row, Path(file).name), self.language)

        with _reading(file):
            system, path = fsspec.url_to_fs(file)
            state = system.ukey(path)
        return Unit(options.key(file, state), rows, cut=True)


def streamed_files(source: str) -> list[str]:
    """Return the files of a URL, or of a folder, that can be streamed.

    Raises:
        SbkitError: the URL cannot be read.
    """
    return Storage.at(source).list_files(SUFFIXES)


def _read(file: str) -> Iterator[TableRow | BadRow]:
    """Yield the rows of a file; those of parquet have their values as they are stored."""
    with _reading(file):
        if file.endswith(".jsonl"):
            with fsspec.open(file, "rt", encoding="utf-8-sig") as lines:
                yield from read_objects(lines)
            return
        with fsspec.open(file, "rb") as stream:
            batches = parquet_batches(pq.ParquetFile(stream))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from (TableRow(number, row) for number, row in enumerate(rows, start=1))


def _shuffle(rows: Iterable[TableRow | BadRow], seed: int) -> Iterator[TableRow | BadRow]:
    """Yield half of some rows in random order, as often as there are so many, then the rest."""
    random, held = np.random.default_rng(seed), list[TableRow | BadRow]()
    for row in rows:
        held.append(row)
        if len(held) == SHUFFLED:
            held = [held[place] for place in random.permutation(SHUFFLED)]
            yield from held[: SHUFFLED // 2]
            del held[: SHUFFLED // 2]
    yield from (held[place] for place in random.permutation(len(held)))


def _with_path(row: TableRow | BadRow, audio: str, file: str, scratch: Path) -> TableRow | BadRow:
    """Return a row with texts in all its columns, and the path of a file in that of the audio."""
    if isinstance(row, BadRow):
        return row
    fields: dict[str, Any] = {**row.fields}
    path = _to_path(fields.pop(audio, None), file, scratch)
    if path is None:
        return BadRow(f"row {row.number}", "no audio file", f"{row.fields[audio]!r:.200}")
    texts = {key: "" if value is None else str(value) for key, value in fields.items()}
    return TableRow(row.number, {**texts, audio: path})


def _to_path(audio: object, file: str, scratch: Path) -> str | None:
    """Return the path of a clip: its own, or that of a file made of its bytes.

    None: it is not there. A row that comes over the net names nothing on this machine, nor of
    another protocol.
    """
    if isinstance(audio, bytes):
        audio = {"bytes": audio}
    held: Mapping[str, Any] = audio if isinstance(audio, Mapping) else {"path": audio}
    content, path = held.get("bytes"), str(held.get("path") or "")
    if content is None:
        if not path or "://" not in file:
            return path
        url = path if "://" in path else f"{file.rpartition('/')[0]}/{path}"
        if "::" in path or not url.startswith(file[: file.index("://")]):
            return None
        folder, _, name = url.rpartition("/")
        try:
            (content,) = Storage.at(folder).read([name])
        except MissingFileError:
            return None
    place = scratch / uuid4().hex / file_name(path, content)
    place.parent.mkdir()
    place.write_bytes(content)
    return str(place)


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Turn what damage ends in into one sentence; libraries have errors of many kinds."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        raise SbkitError(
            f"{file} must be parquet or JSON Lines in UTF-8, but cannot be read "
            f"({type(error).__name__}: {str(error)[:200]}). Correct it."
        ) from error
