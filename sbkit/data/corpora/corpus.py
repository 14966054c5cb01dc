"""What a corpus can do: name its splits, and list the rows of one.

A split that is streamed: parquet or JSON Lines, in a folder or at a URL.

It is read part by part into shards, and never in memory or on the disk as a whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

import fsspec
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.base.files import reading
from sbkit.data.corpora.own_manifest import Located, locate, read_rows
from sbkit.data.corpora.saved_dataset import ROWS_AT_ONCE, file_in, to_table
from sbkit.data.corpora.tables import Table, read_objects
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.manifest import Manifest

SUFFIXES = (".parquet", ".jsonl")
MUST = "be parquet or JSON Lines in UTF-8"


@dataclass(frozen=True)
class StreamedSplit:
    """Files that are read as they come; columns and language are as `read_manifests` takes them."""

    files: tuple[str, ...]
    path_column: str | None
    text_column: str | Literal[False] | None
    language: str

    def read(self, file: str, scratch: Path, start: int) -> Iterator[Manifest]:
        """Yield the rows of a file, some at a time, from part ``start`` on.

        Audio that the file holds, or that comes from a URL, is put into ``scratch`` until the next
        part is asked for.

        Raises:
            SbkitError: the file cannot be read, or lacks a column.
        """
        with reading(file, must=MUST, fix="Correct it."):
            for rows, first in islice(_read(file), start, None):
                with TemporaryDirectory(dir=scratch) as folder:
                    yield self._read_part(rows, first, file, Path(folder))

    def _read_part(self, rows: Any, first: int, file: str, folder: Path) -> Manifest:
        save = partial(_save, folder)
        table = rows if isinstance(rows, Table) else to_table(rows, Path(file), save, first)
        columns = self.path_column, self.text_column, self.language
        found = Manifest((), tuple(table.bad_rows))
        if len(table.rows):
            found = read_rows(table, *columns, partial(_fetch, file, folder))
        bad = tuple(replace(row, id=f"{Path(file).name} {row.id}") for row in found.bad_rows)
        return Manifest(found.clips, bad)


def streamed_files(source: str) -> list[str]:
    """Return the files of a URL, or of a folder, that can be streamed.

    Raises:
        SbkitError: the URL cannot be read.
    """
    return Storage.at(source).list_files(SUFFIXES)


def file_state(file: str) -> str:
    """Return what changes when a file does; raises SbkitError where it is not there."""
    with reading(file, must=MUST, fix="Correct it."):
        system, path = fsspec.url_to_fs(file)
        return str(system.ukey(path))


def _read(file: str) -> Iterator[tuple[Any, int]]:
    """Yield some rows at a time, of parquet as they are stored, and the number of the first."""
    if file.endswith(".jsonl"):
        with fsspec.open(file, "rt", encoding="utf-8-sig") as lines:
            yield from ((table, 1) for table in read_objects(Path(file), lines, ROWS_AT_ONCE))
        return
    with fsspec.open(file, "rb") as stream:
        first = 1
        for batch in pq.ParquetFile(stream).iter_batches(ROWS_AT_ONCE):
            yield batch, first
            first += len(batch)


def _save(folder: Path, content: bytes, path: str) -> Path:
    file = file_in(folder, content, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _fetch(file: str, folder: Path, name: str) -> Located:
    """Return the path of a clip: its own, or that of a file fetched from beside ``file``.

    A row that comes over the net names nothing on this machine, nor of another protocol.
    """
    if "://" not in file or name.startswith(f"{folder}/"):
        return locate(Path(file).parent, name)
    url = name if "://" in name else f"{file.rpartition('/')[0]}/{name}"
    if "::" in name or not name or not url.startswith(file[: file.index("://")]):
        return "no audio file", name
    try:
        with fsspec.open(url, "rb") as stream:
            return str(_save(folder, stream.read(), name))
    except FileNotFoundError:
        return "no audio file", name


class Corpus(Protocol):
    """What a corpus can do; a module with these two functions is one."""

    def splits(self, knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``."""
        ...

    def read(self, knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
        """Return the rows of one split, or what streams them."""
        ...


def describe_corpus(corpus: Corpus | None, knobs: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the name and the licence of a corpus: what its function `about` says, if it has one.

    The name is else that of the module or folder, and the licence None, for unknown.
    """
    about = getattr(getattr(corpus, "module", corpus), "about", None)
    if about is not None:
        return {**about(knobs)}
    named = knobs.get("corpus") or knobs.get("data_folder")
    return {"name": named and Path(str(named)).name, "licence": None}


def read_listed(corpus: Corpus, knobs: Mapping[str, Any], split: str) -> Manifest:
    """Return the rows of one split; raises SbkitError where they are only streamed."""
    source = corpus.read(knobs, split)
    if isinstance(source, StreamedSplit):
        raise SbkitError(
            f"The data of {split} must be listed or in shards, but {source.files[0]} is streamed. "
            "Make shards of it first, sbkit prepare YAML --shards FOLDER, and pass "
            "--data_folder=FOLDER then."
        )
    return source
