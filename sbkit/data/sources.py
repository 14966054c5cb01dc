"""Manifests of the user's own: tables, NeMo's JSON Lines, Kaldi's folders, saved datasets.

Datasets saved by ``datasets.save_to_disk`` and parquet files, with their audio or its paths.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text, reading, write_bytes_atomically
from sbkit.data.cache import EMBEDDED_FOLDER, default_cache, describe_folder
from sbkit.data.filesystem import Storage, writing
from sbkit.data.manifest import BadRow, Clip, Manifest, collect, join_manifests
from sbkit.data.tables import (
    Located,
    Table,
    TextColumn,
    join_tables,
    locate,
    read_objects,
    read_rows,
    read_table,
)

COLUMNS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}  # Kaldi's


def read_manifests(
    sources: Sequence[Path], *, path_column: str | None, text_column: TextColumn, language: str
) -> Manifest:
    """Read files and folders, in their order, as one manifest.

    Args:
        sources: CSV, TSV or JSON Lines, folders of Kaldi, datasets saved to disk, parquet.
        path_column: the column of the audio's path, relative to the manifest; null: a usual name.
        text_column: the column of the transcript; null: a usual name; False: there is none.
        language: of what is spoken, "" where that is not known; the column ``language`` where the
            manifest has none.

    Raises:
        SbkitError: a source cannot be read, or lacks a column.
    """
    parts = [
        (source.name, _read_source(source, path_column, text_column, language))
        for source in sources
    ]
    return join_manifests(parts, *map(embedded_folder, sources), sources[0].parent)


def _read_source(
    source: Path, path_column: str | None, text_column: TextColumn, language: str
) -> Manifest:
    if is_kaldi(source):
        return collect(_read_kaldi(source, language, transcripts=text_column is not False))
    if is_saved_dataset(source):
        table = read_saved_dataset(source)
    elif source.is_dir():
        raise SbkitError(
            f"A manifest that is a folder must be Kaldi's (wav.scp and text) or a dataset saved by "
            f"datasets.save_to_disk, but {source} is neither. Name a file in it."
        )
    else:
        table = read_table(source)
    folder = table.file.parent
    return read_rows(table, path_column, text_column, language, partial(locate, folder), folder)


def is_kaldi(source: Path) -> bool:
    """Return whether a source is a data folder of Kaldi's form."""
    return (source / "wav.scp").is_file()


def _read_kaldi(
    folder: Path, language: str, *, transcripts: bool = True
) -> Iterator[Clip | BadRow]:
    """Read Kaldi's or WeNet's folder: ``wav.scp``, ``text`` and, where it is, ``utt2spk``.

    Each file has lines "KEY VALUE". Paths are relative to the folder.

    Its clips have the column ``language``, which is that of what is spoken without ``utt2lang``.

    Raises:
        SbkitError: ``wav.scp`` holds a command, there are ``segments``, or ``text`` is missing.
    """
    if (folder / "segments").is_file():
        raise SbkitError(
            f"Each recording of {folder} must be one utterance, but the file segments cuts them. "
            "Cut the recordings into files first (in Kaldi: extract-segments)."
        )
    audio = _read_pairs(folder / "wav.scp")
    sentences = dict(_read_pairs(folder / "text")) if transcripts else {}
    columns = {
        name: dict(_read_pairs(folder / file))
        for file, name in COLUMNS.items()
        if (folder / file).is_file()
    }
    if (folder / "spk2gender").is_file():
        of_speaker = dict(_read_pairs(folder / "spk2gender"))
        speakers = columns.get("speaker", {})
        columns.setdefault("gender", {u: of_speaker.get(s, "") for u, s in speakers.items()})
    for number, (utterance, name) in enumerate(audio, start=1):
        where = f"wav.scp line {number}"
        if name.endswith("|") or name.startswith("|"):
            raise SbkitError(
                f"{folder}/wav.scp must name audio files, but line {number} is a command "
                f"({name[:60]}), and sbkit runs none. Write its audio to files and name those."
            )
        if not name:
            yield BadRow(where, "no path", f"{utterance or 'the line'} has no path")
        elif sentences and utterance not in sentences:
            yield BadRow(where, "no transcript", f"text has no line for {utterance}")
        else:
            kept = {column: values.get(utterance, "") for column, values in columns.items()}
            kept.setdefault("language", language)
            yield Clip(utterance, folder / name, sentences.get(utterance, ""), kept)
    for utterance in sorted(sentences.keys() - {key for key, _ in audio}):
        yield BadRow(utterance, "no audio file", "text has a line for it, wav.scp has none")


def _read_pairs(file: Path) -> list[tuple[str, str]]:
    what = f"The file {file.name} of a data folder of Kaldi"
    lines = read_text(file, max_bytes=1 << 31, subject=what)
    split = (line.strip().split(maxsplit=1) for line in lines)
    return [(parts[0] if parts else "", parts[1] if len(parts) > 1 else "") for parts in split]


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
