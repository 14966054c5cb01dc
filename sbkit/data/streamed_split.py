"""A split that `datasets` streams: parquet or JSON Lines, in a folder or at a URL.

It is read row by row into shards, and never in memory or on the disk as a whole.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import datasets
import fsspec

from sbkit.base.errors import SbkitError
from sbkit.data.manifest import BadRow, Row
from sbkit.data.own_manifest import read_rows, with_language
from sbkit.data.shard_units import ShardOptions, Unit
from sbkit.data.storage import MissingFileError, Storage
from sbkit.data.tables import PATH_COLUMNS, Table, TableRow, find_column

BUILDERS = {".parquet": "parquet", ".jsonl": "json"}  # of `datasets`, by the endings of files
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
        def rows(start: int) -> Iterator[Row | BadRow]:
            with _reading(file):
                columns = tuple(next(iter(_open(file)), {}))
            if not columns:  # a file without rows, as Spark writes them
                return
            shuffled = _open(file).shuffle(seed=options.seed, buffer_size=SHUFFLED)
            content = _rows(file, shuffled.skip(start), self.path_column, scratch)
            table = Table(Path(file), columns, content)
            for row in read_rows(table, self.path_column, self.text_column):
                yield with_language(row, self.language)

        with _reading(file):
            system, path = fsspec.url_to_fs(file)
            state = system.ukey(path)
        return Unit(options.key(file, state), rows, cut=True)


def streamed_files(source: str) -> list[str]:
    """Return the files of a URL, or of a folder, that `datasets` can stream.

    Raises:
        SbkitError: the URL cannot be read.
    """
    return Storage.at(source).list_files(list(BUILDERS))


def _rows(
    file: str, dataset: datasets.IterableDataset, path_column: str | None, scratch: Path
) -> Iterator[TableRow]:
    """Yield the rows of a file as those of a table, with files in the place of audio."""
    name = ""
    rows = iter(dataset)
    for number in count(1):
        with _reading(file):
            row: dict[str, Any] | None = next(rows, None)
        if row is None:
            return
        name = name or find_column(
            Table(Path(file), tuple(row), ()), path_column, PATH_COLUMNS, "path_column"
        )
        path = _to_path(row.pop(name, None), file, scratch)
        fields = {key: "" if value is None else str(value) for key, value in row.items()}
        yield TableRow(number, {**fields, name: path})


def _to_path(audio: object, file: str, scratch: Path) -> str:
    """Return the path of a clip: its own, or that of a file made of its bytes."""
    content = None
    path = audio
    if isinstance(audio, Mapping):
        content, path = audio.get("bytes"), audio.get("path")
    elif isinstance(audio, bytes):
        content, path = audio, None
    path = str(path or "")
    if content is None:
        if not path or "://" not in file:
            return path
        url = path if "://" in path else f"{file.rpartition('/')[0]}/{path}"
        folder, _, name = url.rpartition("/")
        try:
            (content,) = Storage.at(folder).read([name])
        except MissingFileError:
            return path.rpartition("://")[2]  # which is not here either, and is left out
    place = scratch / uuid4().hex / (Path(path).name or hashlib.sha256(content).hexdigest()[:16])
    place.parent.mkdir()
    place.write_bytes(content)
    return str(place)


def _open(file: str) -> datasets.IterableDataset:
    builder = BUILDERS[Path(file).suffix]
    opened = datasets.load_dataset(builder, data_files=[file], split="train", streaming=True)
    return opened.decode(False) if opened.features else opened


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Turn what `datasets` raises into one sentence; damage ends in errors of many kinds."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        raise SbkitError(
            f"{file} must be a file that `datasets` can stream, but fails ({type(error).__name__}: "
            f"{str(error)[:200]}). Correct it."
        ) from error
