"""Manifests that a user names: tables, Kaldi's folders, saved datasets, parquet and remote tables.

A source is read as one manifest. Remote tables, parquet or JSON Lines in a folder or at a URL, are
read in batches, for corpora that fit neither into memory nor on the disk.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.base.errors import DataError, SbkitError
from sbkit.base.files import read_text, reading, write_bytes_atomically
from sbkit.data.cache import EXTRACTED_FOLDER, default_cache, describe_folder
from sbkit.data.filesystem import Storage, writing
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.data.tables import (
    Table,
    TableOptions,
    join_tables,
    locate,
    read_objects,
    read_table,
    to_manifest,
)

KALDI_COLUMNS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}
MAX_KALDI_BYTES = 1 << 31
DATASET_FILES = ("state.json", "dataset_dict.json")
REMOTE_SUFFIXES = (".parquet", ".jsonl")
REMOTE_REQUIREMENT = "be parquet or JSON Lines in UTF-8"
BATCH_ROWS = 100  # in memory at a time, with the audio in them

SaveAudio = Callable[[bytes, str], Path]  # writes the bytes of an audio file under a name


def read_manifests(sources: Sequence[Path], options: TableOptions) -> Manifest:
    """Read sources, in their order, as one manifest: all forms except remote tables."""
    parts = [(source.name, _read_source(source, options)) for source in sources]
    return Manifest.join_named(parts, *map(_embedded_folder, sources), sources[0].parent)


def _read_source(source: Path, options: TableOptions) -> Manifest:
    if is_kaldi(source):
        return Manifest.of(_read_kaldi(source, options))
    if is_saved_dataset(source):
        table = _read_saved_dataset(source)
    elif source.is_dir():
        raise DataError(
            f"{source} is neither a data folder of Kaldi (wav.scp and text) nor a dataset saved by "
            "datasets.save_to_disk. Name a file in it."
        )
    else:
        table = read_table(source)
    folder = table.file.parent
    return to_manifest(table, options, partial(locate, folder), folder)


# Kaldi


def is_kaldi(source: Path) -> bool:
    """Check whether a source is a data folder of Kaldi."""
    return (source / "wav.scp").is_file()


def _read_kaldi(folder: Path, options: TableOptions) -> Iterator[Clip | Excluded]:
    """Read a data folder of Kaldi or WeNet: ``wav.scp``, ``text`` and optional columns.

    Each file has lines "KEY VALUE". Paths are relative to the folder. Without ``utt2lang``, the
    options name the language.
    """
    if (folder / "segments").is_file():
        raise DataError(
            f"{folder} cuts its recordings by the file segments, but each recording must be one "
            "utterance. Cut them into files first (in Kaldi: extract-segments)."
        )
    audio = _read_pairs(folder / "wav.scp")
    has_text = options.text_column is not False
    sentences = dict(_read_pairs(folder / "text")) if has_text else {}
    columns = {
        name: dict(_read_pairs(folder / file))
        for file, name in KALDI_COLUMNS.items()
        if (folder / file).is_file()
    }
    if (folder / "spk2gender").is_file():
        genders = dict(_read_pairs(folder / "spk2gender"))
        speakers = columns.get("speaker", {})
        columns.setdefault("gender", {id: genders.get(s, "") for id, s in speakers.items()})
    for number, (id, name) in enumerate(audio, start=1):
        position = f"wav.scp line {number}"
        if name.endswith("|") or name.startswith("|"):
            raise DataError(
                f"{folder}/wav.scp: line {number} is a command ({name[:60]}), which sbkit does not "
                "run. Write its audio to files and name those."
            )
        if not name:
            yield Excluded(position, "no path", f"{id or 'the line'} has no path")
        elif sentences and id not in sentences:
            yield Excluded(position, "no transcript", f"text has no line for {id}")
        else:
            values = {column: by_id.get(id, "") for column, by_id in columns.items()}
            values.setdefault("language", options.language)
            yield Clip(id, folder / name, sentences.get(id, ""), values)
    for id in sorted(sentences.keys() - {key for key, _ in audio}):
        yield Excluded(id, "no audio file", "text has a line for it, wav.scp has none")


def _read_pairs(file: Path) -> list[tuple[str, str]]:
    subject = f"The file {file.name} of a data folder of Kaldi"
    pairs: list[tuple[str, str]] = []
    for line in read_text(file, max_bytes=MAX_KALDI_BYTES, subject=subject):
        key, value, *_ = [*line.strip().split(maxsplit=1), "", ""]
        pairs.append((key, value))
    return pairs


# Datasets of Hugging Face, and parquet


def is_saved_dataset(source: Path) -> bool:
    """Check whether a source is a dataset of ``save_to_disk``, or a parquet file."""
    return source.suffix == ".parquet" or any((source / file).is_file() for file in DATASET_FILES)


def _read_saved_dataset(source: Path) -> Table:
    """Return the rows as text without decoding audio: an audio column becomes its path.

    Audio bytes in the dataset are written to files in the cache.
    """
    if (source / "dataset_dict.json").is_file():
        names = sorted(file.name for file in source.iterdir() if file.is_dir())
        raise DataError(
            f"{source} has the splits {', '.join(names)}, but a manifest is one split. Name one of "
            f"them, such as {source / names[0] if names else source}."
        )
    datasets.disable_progress_bars()
    base = source / "data" if source.is_dir() else source  # paths are relative to its folder
    save = partial(_save_in_cache, source)
    try:
        if source.is_file():
            batches: Iterator[pa.Table] = pq.ParquetFile(source).iter_batches(BATCH_ROWS)
        else:
            dataset = datasets.load_from_disk(str(source)).with_format("arrow")
            batches = dataset.iter(BATCH_ROWS)
        table = join_tables((_to_table(batch, base, save) for batch in batches), base)
    except SbkitError:
        raise
    except Exception as error:  # damage and unknown types raise many kinds of errors
        raise DataError(
            f"{source} cannot be read as a dataset ({type(error).__name__}: {str(error)[:200]}). "
            "Save it again."
        ) from error
    return replace(table, lines=range(1, len(table.rows) + 1))


def _to_table(
    rows: pa.Table | pa.RecordBatch, file: Path, save_audio: SaveAudio, first: int = 1
) -> Table:
    """Return rows as text, numbered from ``first``; audio becomes the path of a file.

    A `datasets.ClassLabel` becomes the name of the class; -1, no class, becomes "".
    """
    if b"huggingface" in (rows.schema.metadata or {}):
        features = datasets.Features.from_arrow_schema(rows.schema)
        for index, (name, feature) in enumerate(features.items()):
            if isinstance(feature, datasets.ClassLabel):
                classes = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                rows = rows.set_column(index, name, pc.take(pa.array(feature.names), classes))
    columns = {
        name: pa.array([_to_text(value, save_audio) for value in rows[name].to_pylist()], "string")
        for name in rows.schema.names
    }
    return Table(file, pa.table(columns), range(first, first + len(rows)))


def _to_text(value: object, save_audio: SaveAudio) -> str:
    if isinstance(value, bytes):
        value = {"path": None, "bytes": value}
    if isinstance(value, Mapping) and {"path", "bytes"} <= value.keys():
        path, content = str(value["path"] or ""), value["bytes"]
        return path if content is None else str(save_audio(content, path))
    return "" if value is None else str(value)


def _embedded_folder(source: Path) -> Path:
    """Return the folder of the cache for the audio bytes of a dataset."""
    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:12]
    return default_cache() / EXTRACTED_FOLDER / f"{source.name}-{key}"


def _audio_file(folder: Path, content: bytes, path: str) -> Path:
    """Return the path of a file for some audio bytes, in a folder of its own.

    Its name, which becomes the clip's id, is the one that the dataset gives or else a hash.
    """
    digest, name = hashlib.sha256(content).hexdigest()[:16], Path(path).name
    return folder / digest[:2] / digest / (name if name not in ("", "..") else digest)


def _save_in_cache(source: Path, content: bytes, path: str) -> Path:
    folder = _embedded_folder(source)
    file = _audio_file(folder, content, path)
    if not file.is_file():
        with writing(folder):
            file.parent.mkdir(parents=True, exist_ok=True)
            describe_folder(folder, source.resolve())
            write_bytes_atomically(file, content)
    return file


# Remote tables


@dataclass(frozen=True)
class RemoteTables:
    """The tables of a split, which are read in batches and never as a whole."""

    files: tuple[str, ...]
    options: TableOptions

    def read(self, file: str, scratch: Path, start: int) -> Iterator[Manifest]:
        """Yield the batches of a file, from batch ``start`` on.

        Audio bytes of the file, and audio at a URL, are in ``scratch`` until the next batch.
        """
        with reading(file, REMOTE_REQUIREMENT, fix="Correct it."):
            for rows, first in islice(_read_batches(file), start, None):
                with TemporaryDirectory(dir=scratch) as folder:
                    yield self._to_manifest(rows, first, file, Path(folder))

    def _to_manifest(
        self, rows: Table | pa.RecordBatch, first: int, file: str, folder: Path
    ) -> Manifest:
        save = partial(_save, folder)
        table = rows if isinstance(rows, Table) else _to_table(rows, Path(file), save, first)
        if len(table.rows):
            manifest = to_manifest(table, self.options, partial(_fetch, file, folder))
        else:
            manifest = Manifest.of(table.excluded)
        name = Path(file).name
        excluded = (replace(row, id=f"{name} {row.id}") for row in manifest.excluded)
        return replace(manifest, excluded=tuple(excluded))


def remote_tables(source: str) -> list[str]:
    """Return the parquet and JSON Lines files at a URL or in a folder."""
    return Storage(source).list_files(REMOTE_SUFFIXES)


def file_version(file: str) -> str:
    """Return text that changes when a file does."""
    with reading(file, REMOTE_REQUIREMENT, fix="Correct it."):
        system, path = fsspec.url_to_fs(file)
        return str(system.ukey(path))


def _read_batches(file: str) -> Iterator[tuple[Table | pa.RecordBatch, int]]:
    """Yield batches of rows, each with the number of its first row; parquet keeps its types."""
    if file.endswith(".jsonl"):
        with fsspec.open(file, "rt", encoding="utf-8-sig") as lines:
            yield from ((table, 1) for table in read_objects(Path(file), lines, BATCH_ROWS))
        return
    with fsspec.open(file, "rb") as stream:
        first = 1
        for batch in pq.ParquetFile(stream).iter_batches(BATCH_ROWS):
            yield batch, first
            first += len(batch)


def _save(folder: Path, content: bytes, path: str) -> Path:
    file = _audio_file(folder, content, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _fetch(file: str, folder: Path, name: str) -> str | Excluded:
    """Return the path of a clip that a row of ``file`` names; fetch it first if it is remote.

    A row of a remote file may name neither a file on this machine nor one of another protocol.
    """
    if "://" not in file or name.startswith(f"{folder}/"):  # local, or already saved
        return locate(Path(file).parent, name)
    url = name if "://" in name else f"{file.rpartition('/')[0]}/{name}"
    if name and "::" not in name and url.startswith(file[: file.index("://")]):
        try:
            with fsspec.open(url, "rb") as stream:
                return str(_save(folder, stream.read(), name))
        except FileNotFoundError:
            pass
    return Excluded("", "no audio file", name)
