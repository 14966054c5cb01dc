"""Read manifests that a user names: tables, Kaldi folders, saved datasets and table folders.

A source is one file or folder. A table folder has tars, parquet or JSON Lines files, here or at a
URL. They are read in batches, because such a corpus may fit neither into memory nor on the disk.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.audio.io import AudioPart
from sbkit.base.errors import DataError, SbkitError
from sbkit.base.files import parse_errors_as_sbkit_errors, read_text_lines, write_bytes_atomically
from sbkit.data.cache import EXTRACTED_FOLDER, default_cache, describe_folder
from sbkit.data.filesystem import Storage, disk_errors_as_data_errors
from sbkit.data.lhotse_cuts import is_cut_manifest, read_cuts
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.data.tables import (
    INVALID_PART,
    PATH_COLUMNS,
    TEXT_COLUMNS,
    Table,
    TableOptions,
    find_column,
    join_tables,
    locate,
    parse_channel,
    read_objects,
    read_table,
    to_manifest,
    to_part,
)
from sbkit.data.tars import TAR_SUFFIXES, manifest_of, read_tar, select_tars

KALDI_COLUMNS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}
MAX_KALDI_BYTES = 1 << 31
DATASET_FILES = ("state.json", "dataset_dict.json")
TABLE_SUFFIXES = (".parquet", ".jsonl")
TABLE_REQUIREMENT = "be parquet, JSON Lines in UTF-8 or tar"
BATCH_ROWS = 100  # in memory at a time, with the audio in them

WriteAudio = Callable[[bytes, str], Path]  # writes the bytes of an audio file under a name


def read_manifests(sources: Sequence[Path], options: TableOptions) -> Manifest:
    """Read sources, in their order, as one manifest: all forms except table folders."""
    parts = [(source.name, _read_source(source, options)) for source in sources]
    folders = [_embedded_folder(source) for source in sources]
    return Manifest.join_named(parts, *folders, sources[0].parent)


def _read_source(source: Path, options: TableOptions) -> Manifest:
    if is_kaldi(source):
        return Manifest.of(_read_kaldi(source, options))
    if is_cut_manifest(source):
        return Manifest.of(read_cuts(source, options))
    if is_arrow_dataset(source):
        table = _read_arrow_dataset(source, options)
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
    """Read a data folder of Kaldi or WeNet: ``wav.scp``, ``text`` and optional files.

    Each file has lines "KEY VALUE". Paths are relative to the folder. ``segments`` cuts the
    recordings of ``wav.scp`` into utterances. ``reco2file_and_channel`` names the channels of
    files with several. Without ``utt2lang``, the options name the language.
    """
    recordings = _read_recordings(folder)
    listing = "segments" if (folder / "segments").is_file() else "wav.scp"
    utterances = _read_lines(folder / listing)
    has_text = options.text_column is not False
    sentences = _read_values(folder / "text") if has_text else {}
    columns = {
        name: _read_values(folder / file)
        for file, name in KALDI_COLUMNS.items()
        if (folder / file).is_file()
    }
    if (folder / "spk2gender").is_file():
        genders = _read_values(folder / "spk2gender")
        speakers = columns.get("speaker", {})
        columns.setdefault("gender", {id: genders.get(s, "") for id, s in speakers.items()})
    for number, id, value in utterances:
        position = f"{listing} line {number}"
        fields = value.split() if listing == "segments" else [id, "0", "-1"]
        part = _locate_utterance(folder, recordings, id, fields)
        if isinstance(part, Excluded):
            yield replace(part, id=position)
        elif sentences and id not in sentences:
            yield Excluded(position, "no transcript", f"text has no line for {id}")
        else:
            values = {column: by_id.get(id, "") for column, by_id in columns.items()}
            values.setdefault("language", options.language)
            yield Clip(id, Path(part.path), sentences.get(id, ""), values, *part[1:])
    for id in sorted(sentences.keys() - {line.key for line in utterances}):
        yield Excluded(id, "no audio file", f"text has a line for it, {listing} has none")


def _read_recordings(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the path and the channel of recordings; raise DataError if one is a command."""
    file = folder / "wav.scp"
    lines = _read_lines(file)
    for line in lines:
        if line.value.endswith("|") or line.value.startswith("|"):
            raise DataError(
                f"{file}: line {line.number} is a command ({line.value[:60]}), which sbkit does "
                "not run. Write its audio to files and name those."
            )
    names = folder / "reco2file_and_channel"  # "RECORDING FILE CHANNEL", with names for scoring
    values = _read_values(names) if names.is_file() else {}
    channels = {id: value.split()[-1] for id, value in values.items()}
    num_recordings = Counter(line.value for line in lines)  # by path; one may be one side already
    return {
        line.key: (line.value, channels.get(line.key, "") if num_recordings[line.value] > 1 else "")
        for line in lines
    }


def _locate_utterance(
    folder: Path, recordings: Mapping[str, tuple[str, str]], id: str, fields: Sequence[str]
) -> AudioPart | Excluded:
    """Return the audio of the fields "RECORDING START END", with a channel if there are four.

    An END of -1 is the end of the file.
    """
    if len(fields) not in (3, 4):
        return Excluded("", "wrong number of fields", f"{1 + len(fields)} instead of 4 or 5")
    name, recorded_channel = recordings.get(fields[0], ("", ""))
    channel = parse_channel(fields[3] if len(fields) == 4 else recorded_channel)
    if isinstance(channel, Excluded):
        return channel
    if not name:
        return Excluded("", "no path", f"wav.scp has no path of {fields[0]}")
    try:
        start, end = map(float, fields[1:3])
    except ValueError as error:
        return Excluded("", INVALID_PART, f"{id}: {error}")
    return to_part(str(folder / name), start, None if end == -1 else end, channel)


class KaldiLine(NamedTuple):
    """A line "KEY VALUE" of a Kaldi file."""

    number: int  # 1 for the first line
    key: str
    value: str


def _read_lines(file: Path) -> list[KaldiLine]:
    """Return the lines of a Kaldi file, without blank lines."""
    subject = f"The file {file.name} of a data folder of Kaldi"
    lines: list[KaldiLine] = []
    text = read_text_lines(file, max_bytes=MAX_KALDI_BYTES, subject=subject)
    for number, line in enumerate(text, start=1):
        fields = line.strip().split(maxsplit=1)
        if fields:
            value = fields[1] if len(fields) > 1 else ""
            lines.append(KaldiLine(number, fields[0], value))
    return lines


def _read_values(file: Path) -> dict[str, str]:
    return {line.key: line.value for line in _read_lines(file)}


# Datasets of Hugging Face, and parquet


def is_arrow_dataset(source: Path) -> bool:
    """Check whether a source is a dataset of ``save_to_disk``, or a parquet file."""
    return source.suffix == ".parquet" or any((source / file).is_file() for file in DATASET_FILES)


def _read_arrow_dataset(source: Path, options: TableOptions) -> Table:
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
    # Paths in a table are relative to the folder of its file. A dataset is a folder and has no such
    # file, so the name "data" stands in for it.
    file = source / "data" if source.is_dir() else source
    write_audio = partial(_cache_audio, source)
    try:
        if source.is_file():
            batches: Iterator[pa.Table] = pq.ParquetFile(source).iter_batches(BATCH_ROWS)
        else:
            dataset = datasets.load_from_disk(str(source)).with_format("arrow")
            batches = dataset.iter(BATCH_ROWS)
        tables = [_to_table(batch, file, options, write_audio) for batch in batches]
        table = join_tables(tables, file)
    except SbkitError:
        raise
    except Exception as error:  # damage and unknown types raise many kinds of errors
        raise DataError(
            f"{source} cannot be read as a dataset ({type(error).__name__}: {str(error)[:200]}). "
            "Save it again."
        ) from error
    return replace(table, lines=range(1, len(table.rows) + 1))


def _to_table(
    rows: pa.Table | pa.RecordBatch,
    file: Path,
    options: TableOptions,
    write_audio: WriteAudio,
    first_row: int = 1,
) -> Table:
    """Return rows as text, numbered from ``first_row``.

    Audio bytes become the path of a file that ``write_audio`` writes. A `datasets.ClassLabel`
    becomes the name of the class; -1, no class, becomes "".
    """
    if b"huggingface" in (rows.schema.metadata or {}):
        features = datasets.Features.from_arrow_schema(rows.schema)
        for index, (name, feature) in enumerate(features.items()):
            if isinstance(feature, datasets.ClassLabel):
                classes = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                rows = rows.set_column(index, name, pc.take(pa.array(feature.names), classes))
    names = rows.schema.names
    audio_column = find_column(names, options.path_column, PATH_COLUMNS)
    text_column = None
    if options.text_column is not False:
        text_column = find_column(names, options.text_column, TEXT_COLUMNS)
    columns: dict[str, pa.Array] = {}
    for name in names:
        values = rows[name].to_pylist()
        try:
            if name == audio_column:
                texts = [_to_path(value, write_audio) for value in values]
            else:
                texts = [_to_text(value) for value in values]
        except UnicodeDecodeError as error:
            if name == text_column:
                raise DataError(
                    f"The column {name} of {file} holds bytes that are not UTF-8 text ({error}). "
                    "Convert it to strings, or name another column with --text_column."
                ) from error
            continue  # a column of other data, such as pictures, is left out
        columns[name] = pa.array(texts, "string")
    return Table(file, pa.table(columns), range(first_row, first_row + len(rows)))


def _to_path(value: object, write_audio: WriteAudio) -> str:
    """Return the path in a value of the audio column; write a file if there are audio bytes."""
    if isinstance(value, bytes) and not _is_path(value):
        return str(write_audio(value, ""))
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return str(write_audio(value["bytes"], str(value.get("path") or "")))
    return _to_text(value)


def _is_path(value: bytes) -> bool:
    """Check whether bytes are a path, as in a parquet file of Spark, or else an audio file.

    A path is text without NUL. The header of an audio file has a NUL, or is not UTF-8.
    """
    try:
        return "\0" not in value.decode()
    except UnicodeDecodeError:
        return False


def _to_text(value: object) -> str:
    """Return a value as text, an audio file as its path.

    By default Spark and Impala write strings as bytes.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping) and {"path", "bytes"} <= value.keys():
        return str(value["path"] or "")
    return str(value)


def _embedded_folder(source: Path) -> Path:
    """Return the cache folder to which the audio bytes of a dataset are written."""
    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:12]
    return default_cache() / EXTRACTED_FOLDER / f"{source.name}-{key}"


def _audio_file(folder: Path, content: bytes, path: str) -> Path:
    """Return the path for an audio file with these bytes.

    The file has a folder of its own, named by a hash. The name of the file becomes the clip's id:
    the name in ``path``, or the hash if there is none.
    """
    digest = hashlib.sha256(content).hexdigest()[:16]
    name = Path(path).name
    if name in ("", ".."):
        name = digest
    return folder / digest[:2] / digest / name


def _cache_audio(source: Path, content: bytes, path: str) -> Path:
    folder = _embedded_folder(source)
    file = _audio_file(folder, content, path)
    if not file.is_file():
        with disk_errors_as_data_errors(folder):
            file.parent.mkdir(parents=True, exist_ok=True)
            describe_folder(folder, source.resolve())
            write_bytes_atomically(file, content)
    return file


# Table folders


@dataclass(frozen=True)
class TableFolders:
    """The tables and tars of a split in local or remote folders, which are read in batches."""

    files: tuple[str, ...]
    options: TableOptions

    def read(self, file: str, scratch: Path, start_batch: int) -> Iterator[Manifest]:
        """Yield the batches of a file from batch ``start_batch`` on.

        Audio bytes of the file, and audio at a URL, are in ``scratch`` until the next batch.
        """
        with (
            parse_errors_as_sbkit_errors(file, TABLE_REQUIREMENT, fix="Correct it."),
            TemporaryDirectory(dir=scratch) as temporary,
        ):
            audio_folder = Path(temporary) / "audio"
            if file.endswith(TAR_SUFFIXES):
                tar_batches = read_tar(file, audio_folder, self.options, BATCH_ROWS)
                manifests: Iterator[Manifest] = islice(tar_batches, start_batch, None)
            else:
                tables = self._read_tables(file, audio_folder, start_batch)
                manifests = (self._to_manifest(table, file, audio_folder) for table in tables)
            for manifest in manifests:
                yield _name_excluded(manifest.without_repeats(), file)
                shutil.rmtree(audio_folder, ignore_errors=True)

    def _read_tables(self, file: str, audio_folder: Path, start_batch: int) -> Iterator[Table]:
        if file.endswith(".jsonl"):
            with fsspec.open(file, "rt", encoding="utf-8-sig") as lines:
                tables = read_objects(Path(file), lines, BATCH_ROWS)
                yield from islice(tables, start_batch, None)
            return
        write_audio = partial(_write_audio, audio_folder)
        first_row = 1
        with fsspec.open(file, "rb") as stream:
            for index, rows in enumerate(pq.ParquetFile(stream).iter_batches(BATCH_ROWS)):
                if index >= start_batch:
                    yield _to_table(rows, Path(file), self.options, write_audio, first_row)
                first_row += len(rows)

    def _to_manifest(self, table: Table, file: str, audio_folder: Path) -> Manifest:
        if not len(table.rows):
            return Manifest.of(table.excluded)
        # A recording is fetched once for all of its parts.
        find_audio = lru_cache(maxsize=None)(partial(_fetch_audio, file, audio_folder))
        return to_manifest(table, self.options, find_audio)


def _name_excluded(manifest: Manifest, file: str) -> Manifest:
    """Start the ids of excluded rows with the name of their file."""
    name = Path(file).name
    excluded = (replace(row, id=f"{name} {row.id}") for row in manifest.excluded)
    return replace(manifest, excluded=tuple(excluded))


def list_tables(source: str) -> list[str]:
    """Return the tars at a URL or in a folder; if there are none, parquet and JSON Lines files."""
    files = Storage(source).list_files((*TABLE_SUFFIXES, *TAR_SUFFIXES))
    return select_tars(files) or files


def file_version(file: str) -> str:
    """Return text that changes when the file or its manifest does, such as a hash of the times."""
    with parse_errors_as_sbkit_errors(file, TABLE_REQUIREMENT, fix="Correct it."):
        filesystem, path = fsspec.url_to_fs(file)
        manifest = manifest_of(file)
        return " ".join(str(filesystem.ukey(part)) for part in (path, manifest) if part)


def _write_audio(folder: Path, content: bytes, path: str) -> Path:
    file = _audio_file(folder, content, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _fetch_audio(file: str, audio_folder: Path, name: str) -> str | Excluded:
    """Return the path of the audio that a row of ``file`` names; fetch remote audio first.

    A row of a remote file can only name files that are reached in the same way: neither a file on
    this machine nor one of another protocol.
    """
    is_local = "://" not in file
    is_written = name.startswith(f"{audio_folder}/")
    if is_local or is_written:
        return locate(Path(file).parent, name)
    url = name if "://" in name else f"{file.rpartition('/')[0]}/{name}"
    if name and "::" not in name and _protocol_of(url) == _protocol_of(file):
        try:
            with fsspec.open(url, "rb") as stream:
                return str(_write_audio(audio_folder, stream.read(), name))
        except (FileNotFoundError, IsADirectoryError):
            pass
    return Excluded("", "no audio file", name)


def _protocol_of(url: str) -> str:
    """Return the protocol of a URL, with https as http."""
    protocol = url.partition("://")[0]
    return "http" if protocol == "https" else protocol
