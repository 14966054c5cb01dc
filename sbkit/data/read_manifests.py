"""Read what a user names: tables, datasets, rows in memory and table folders.

A table folder has tars, parquet or JSON Lines files, here or at a URL. They are read in batches,
because such a corpus may fit neither into memory nor on the disk.
"""

import hashlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import IOBase
from itertools import chain, product
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.audio.io import SUFFIXES as AUDIO_SUFFIXES
from sbkit.audio.io import encode_audio, file_or_array, to_samples
from sbkit.base.content_cache import caches, default_cache, find_kept, keep
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import pointer_sentence, write_bytes_atomically
from sbkit.base.messages import listed, note_once, short_value
from sbkit.data.cache import EXTRACTED_FOLDER, describe_folder
from sbkit.data.columns import (
    PATH_COLUMNS,
    ROLE_OF,
    SPEAKER_COLUMNS,
    TEXT_COLUMNS,
    find_column,
    find_columns,
    plain_name,
)
from sbkit.data.filesystem import Storage, access_errors, disk_errors, unpacking_errors
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.tables import (
    DATA_ROOT,
    Table,
    TableOptions,
    WriteAudio,
    audio_folder,
    is_missing,
    join_tables,
    locate,
    locate_clip,
    read_objects,
    read_table,
    to_manifest,
)
from sbkit.data.tars import TAR_SUFFIXES, nemo_manifest, read_tar

TABLE_SUFFIXES = (".parquet", ".jsonl")
FOLDER_MARK = "/state.json"  # in a saved dataset
TABLE_NAME = re.compile(
    r"\.(parquet|tar|tar\.gz|tgz|(jsonl|csv|tsv|json)(\.gz|\.bz2|\.xz|\.zst)?)$"
)
# A role in a name; see https://huggingface.co/docs/hub/datasets-file-names-and-splits
ROLE_NAME = re.compile(rf"(?<![^\W\d_])({'|'.join(ROLE_OF)})(?![^\W\d_])")
TEXT_ENDINGS = (".normalized.txt", ".txt", ".lab")  # of LibriTTS, VCTK and HTK, beside a clip
TEXTS_TO_TABLE = (
    r"(printf 'path\tspeaker\tsentence\n'; find * -name '*AUDIO' | while read -r f; do "
    r"""printf '%s\t%s\t%s\n' "$f" "${f%%/*}" "$(tr -s '[:space:]' ' ' < "${f%AUDIO}TEXT")"; """
    "done) > metadata.tsv"
)
TABLE_FAILURE = "must be parquet, JSON Lines in UTF-8 or tar, but cannot be read"
BATCH_ROWS = 100  # in memory at a time, with the audio in them
ROWS_FOLDER, ROWS_TABLE = "rows", "rows.parquet"  # in the cache
CONTENTS = frozenset({"array", "bytes", "path"})  # of audio, as `datasets` gives it


def read_manifests(sources: Sequence[tuple[Path, TableOptions]]) -> Manifest:
    """Read sources, in their order, as one manifest: all forms except table folders."""
    parts = [(source.name, _read_source(source, options)) for source, options in sources]
    folders = [cache / _embedded_folder(source) for source, _ in sources for cache in caches()]
    return Manifest.join_named(parts, *folders, sources[0][0].parent)


def _read_source(source: Path, options: TableOptions) -> Manifest:
    table, options = read_rows(source, options)
    path = find_column(table.rows.column_names, options.path_column, PATH_COLUMNS)
    folder = audio_folder(table, path or "")
    is_used = path and pc.any(pc.starts_with(table.rows[path], DATA_ROOT)).as_py()
    if options.data_root and not is_used:
        raise ConfigError(
            f"`data_folder` stands for {DATA_ROOT}, but no path of {source} begins with it."
        )
    find_audio = partial(locate, folder, data_root=options.data_root)
    if folder != table.file.parent:
        find_audio = partial(locate_clip, folder)
    return to_manifest(table, options, find_audio, folder)


def read_rows(source: Path, options: TableOptions) -> tuple[Table, TableOptions]:
    """Read the rows of a file or folder, and return the options that name their columns."""
    if is_arrow_dataset(source):
        return _read_arrow_dataset(source, options), options
    if metadata := find_metadata(source):
        return read_table(metadata, options.encoding), options
    if source.is_dir():
        for clip, ending in product(source.rglob("*"), TEXT_ENDINGS):
            if clip.suffix in AUDIO_SUFFIXES and clip.with_suffix(ending).is_file():
                command = TEXTS_TO_TABLE.replace("AUDIO", clip.suffix).replace("TEXT", ending)
                raise DataError(
                    f"{source} has texts beside its clips. Write its table: cd "
                    f"{shlex.quote(str(source))} && {command}",
                    where=str(source),
                )
        raise DataError(
            f"{source} is no dataset of save_to_disk, and has no metadata.csv or metadata.jsonl. "
            "Folders of Kaldi and Lhotse are named in `data_folder`.",
            where=str(source),
        )
    return read_table(source, options.encoding), options


def find_metadata(folder: Path) -> Path | None:
    """Return the table of a folder of clips, as Hugging Face and LJSpeech name it."""
    files = [folder / f"metadata.{suffix}" for suffix in ("csv", "jsonl", "tsv")]
    return next(filter(Path.is_file, files), None)


# Datasets of Hugging Face, and parquet


def is_arrow_dataset(source: Path) -> bool:
    """Check whether a source is a dataset of ``save_to_disk``, or a parquet file."""
    return source.suffix == ".parquet" or (source / "state.json").is_file()


def _read_arrow_dataset(source: Path, options: TableOptions) -> Table:
    """Return the rows as text; audio bytes in the dataset are written to files in the cache."""
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
        return join_tables(_to_tables(batches, file, options, write_audio), file)
    # An ArrowTypeError is a TypeError, and `datasets` takes what it needs from JSON files.
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise DataError(
            pointer_sentence(source)
            or f"{source} cannot be read as a dataset ({type(error).__name__}: {str(error)[:200]})."
        ) from error


def _to_tables(
    batches: Iterable[pa.Table | pa.RecordBatch],
    file: Path,
    options: TableOptions,
    write_audio: WriteAudio,
) -> Iterator[Table]:
    first_row = 1
    for rows in batches:
        yield _to_table(rows, file, options, write_audio, first_row)
        first_row += len(rows)


def _to_table(
    rows: pa.Table | pa.RecordBatch,
    file: Path,
    options: TableOptions,
    write_audio: WriteAudio,
    first_row: int,
) -> Table:
    """Return rows as text, numbered from ``first_row``; audio bytes become the path of a file."""
    rows = name_classes(rows)
    names = rows.schema.names
    audio_columns = find_columns(names, options.path_column, PATH_COLUMNS)
    has_bytes = [name for name in audio_columns if not is_text(rows.schema.field(name).type)]
    audio_column = next(iter(has_bytes or audio_columns), None)
    text_columns = []
    if options.text_column is not False:
        text_columns = find_columns(names, options.text_column, TEXT_COLUMNS)
    columns: dict[str, pa.Array] = {}
    other_values: dict[str, tuple[int, object]] = {}
    for name in names:
        if name == audio_column:  # row by row: a list of samples takes much memory
            paths = [_to_path(value.as_py(), write_audio) for value in rows[name]]
            columns[name] = pa.array(paths, "string")
        if name in audio_columns:
            continue  # the path beside the sound of a dataset is that of its origin
        values = rows[name].to_pylist()
        if name in text_columns:
            for row, value in enumerate(values, start=first_row):
                if not (isinstance(value, str | bytes) or is_missing(value)):
                    other_values.setdefault(name, (row, value))
        try:
            texts = [_to_text(value) for value in values]
        except UnicodeDecodeError as error:
            if name in text_columns:
                raise DataError(
                    f"The column {name} of {file} holds bytes that are not UTF-8 text ({error})."
                ) from error
            if plain_name(name) not in SPEAKER_COLUMNS:
                continue  # a column of other data, such as pictures, is left out
            texts = [value.hex() if isinstance(value, bytes) else "" for value in values]
        columns[name] = pa.array(texts, "string")
    lines = range(first_row, first_row + len(rows))
    return Table(file, pa.table(columns), lines, other_values=other_values)


def name_classes(rows: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Replace the numbers of a `datasets.ClassLabel` by the names of its classes."""
    if b"huggingface" in (rows.schema.metadata or {}):
        features = datasets.Features.from_arrow_schema(rows.schema)
        for index, (name, feature) in enumerate(features.items()):
            if isinstance(feature, datasets.ClassLabel):
                classes = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
                rows = rows.set_column(index, name, pc.take(pa.array(feature.names), classes))
    return rows


def _to_path(value: object, write_audio: WriteAudio) -> str:
    if isinstance(value, list) or (isinstance(value, Mapping) and value.get("array") is not None):
        value = to_file(value)
    if isinstance(value, bytes) and not _is_path(value):
        return str(write_audio(value, ""))
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return str(write_audio(value["bytes"], _to_text(value.get("path"))))
    return _to_text(value)


def to_file(audio: Any) -> str | dict[str, Any]:
    """Return the absolute path of audio, or its content as `datasets` stores it."""
    source, rate = file_or_array(audio)
    if isinstance(source, str | Path):
        return str(source) if "://" in str(source) else str(Path(source).absolute())
    if rate is not None:
        source = encode_audio(to_samples(source), rate, "WAV")
    elif isinstance(source, IOBase):
        source = source.read()
    name = audio.get("path") if isinstance(audio, Mapping) and rate is None else None
    return {"bytes": source, "path": name}


def is_text(type: pa.DataType) -> bool:
    """Check whether values of a type of Arrow are texts: of polars, pandas or a category, too."""
    type = type.value_type if pa.types.is_dictionary(type) else type
    return type in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def _is_path(value: bytes) -> bool:
    """Check whether bytes are a path, as Spark writes it: an audio file has a NUL or no UTF-8."""
    try:
        return "\0" not in value.decode()
    except UnicodeDecodeError:
        return False


def _to_text(value: object) -> str:
    """Return a value as text, an audio file as its path; Spark writes strings as bytes."""
    if is_missing(value):
        return ""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping) and {"path", "bytes"} <= value.keys():
        return _to_text(value["path"])
    return str(value)


def _embedded_folder(source: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:12]
    return Path(EXTRACTED_FOLDER, f"{source.name}-{key}")


def _audio_file(folder: Path, content: bytes, path: str) -> Path:
    """Return the path for an audio file: in a folder named by its hash, under its own name."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    name = Path(path).name
    if name in ("", ".."):
        name = digest
    return folder / digest[:2] / digest / name


def _cache_audio(source: Path, content: bytes, path: str) -> Path:
    name = _audio_file(_embedded_folder(source), content, path)
    if file := find_kept(name):
        return file
    folder, file = default_cache() / _embedded_folder(source), default_cache() / name
    with disk_errors(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
        describe_folder(folder, source.resolve())
        write_bytes_atomically(file, content)
    return file


# Rows that Python holds, kept as a table in the cache


def store_rows(rows: Any) -> Path:
    """Store rows with the columns of a table, and return the file.

    rows: mappings in any iterable, a pandas DataFrame or a dataset of `datasets`. Audio is a path,
        or anything else that `stream_source` takes. Paths are relative to the working folder.

    >>> clip = {"array": [0.0] * 800, "sampling_rate": 16_000}
    >>> store_rows([{"audio": clip, "text": "nothing"}]).suffix
    '.parquet'
    """
    stored = [_to_stored(record) for record in _to_records(rows)]
    # Not Table.from_pylist, which drops the columns that the first row lacks
    names = dict.fromkeys(name for row in stored for name in row)
    if not names:
        raise DataError("There are no rows.")
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in stored])
        except pa.ArrowException as error:
            raise DataError(f"The column {name} cannot be stored in a table: {error}") from error
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    content = buffer.getvalue()

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / ROWS_TABLE).write_bytes(content)

    made_from = {"content": hashlib.sha256(content).hexdigest()}
    return keep(ROWS_FOLDER, made_from, write, by_code=False) / ROWS_TABLE


def _to_records(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        for name, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Audio):
                rows = rows.cast_column(name, datasets.Audio(decode=False))
        if not (isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom"):
            tables = map(name_classes, rows.with_format("arrow").iter(BATCH_ROWS))
            rows = chain.from_iterable(table.to_pylist() for table in tables)
    elif hasattr(rows, "iterrows"):  # a DataFrame
        rows = rows.to_dict("records")
    records = [*rows] if isinstance(rows, Iterable) else [rows]
    for record in records:
        if not isinstance(record, Mapping):
            raise DataError(
                "Rows must be mappings, a DataFrame or a datasets.Dataset, but one is "
                f"{short_value(record)}."
            )
    return records


def _to_stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose arrays are WAV files, and whose paths are absolute."""
    path_columns = find_columns([*map(str, record)], None, PATH_COLUMNS)
    stored: dict[str, Any] = {}
    for column, value in record.items():
        name = str(column)
        is_audio = name in path_columns or hasattr(value, "get_all_samples")
        if isinstance(value, Mapping) and not CONTENTS.isdisjoint(value):
            is_audio = True
            if all(value.get(key) is None for key in CONTENTS):
                value = None
        if is_missing(value):
            stored[name] = None
        else:
            stored[name] = to_file(value) if is_audio else value
    return stored


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
            access_errors(file),
            unpacking_errors(file, TABLE_FAILURE, fix="Correct it."),
            TemporaryDirectory(dir=scratch) as temporary,
        ):
            audio_folder = Path(temporary) / "audio"
            tables = self._read_tables(file, partial(_write_audio, audio_folder))
            options = self.options
            if file.endswith(TAR_SUFFIXES):  # whose readers name the path
                options = replace(options, path_column=None)
            for index, table in enumerate(tables):
                if index >= start_batch:
                    # A recording is fetched once for all of its parts.
                    find_audio = lru_cache(maxsize=None)(partial(_fetch_audio, file, audio_folder))
                    manifest = Manifest.of(table.excluded)
                    if len(table.rows):
                        manifest = to_manifest(table, options, find_audio).without_repeats()
                    name = Path(file).name
                    excluded = [replace(r, id=f"{name} {r.id}") for r in manifest.excluded]
                    yield replace(manifest, excluded=tuple(excluded))
                shutil.rmtree(audio_folder, ignore_errors=True)

    def _read_tables(self, file: str, write_audio: WriteAudio) -> Iterator[Table]:
        if file.endswith(TAR_SUFFIXES):
            yield from read_tar(file, self.options, BATCH_ROWS, write_audio)
        elif file.endswith(".jsonl"):
            encoding = self.options.encoding or "utf-8-sig"
            with fsspec.open(file, "rt", encoding=encoding) as lines:
                yield from read_objects(Path(file), lines, BATCH_ROWS)
        else:
            with fsspec.open(file, "rb") as stream:
                batches = pq.ParquetFile(stream).iter_batches(BATCH_ROWS)
                yield from _to_tables(batches, Path(file), self.options, write_audio)


def list_tables(source: str) -> list[str]:
    """Return the tars at a URL or in a folder; if there are none, parquet and JSON Lines files."""
    return _choose_tables(Storage(source).list_files((*TABLE_SUFFIXES, *TAR_SUFFIXES)))


def _choose_tables(files: Sequence[str]) -> list[str]:
    """Return the tars, or else the tables; JSON, which may describe these, if it is alone."""
    tars = [file for file in files if file.endswith(TAR_SUFFIXES)]
    tables = [file for file in files if not re.search(r"\.json(\.\w+)?$", file)]
    return tars or tables or [*files]


def find_splits(source: str) -> dict[str, list[str]]:
    """Return the tables, tars and data folders in a folder or at a URL, by the role in their name.

    The names of folders count first, and one with two roles does not. One table has no roles.
    """
    if "://" not in source and (not Path(source).is_dir() or find_metadata(Path(source))):
        return {}
    storage = Storage(source)
    depth = len(PurePosixPath(storage.folder or storage.url).parts)
    files = {file for file in storage.list_files([""]) if TABLE_NAME.search(file)}
    folders = {file.rpartition("/")[0] for file in files if file.endswith(FOLDER_MARK)}
    inside = tuple(f"{folder}/" for folder in folders)
    by_role: dict[str, list[str]] = {}
    for path in sorted(path for path in folders | files if not path.startswith(inside)):
        names = PurePosixPath(path).parts[depth:]
        roles = [{ROLE_OF[word] for word in ROLE_NAME.findall(name.lower())} for name in names]
        role = next((min(named) for named in roles if len(named) == 1), "")
        if not any(name.startswith(".") for name in names):
            by_role.setdefault(role, []).append(path)
    unassigned = [path for path in by_role.pop("", []) if not path.endswith(".json")]
    if by_role and unassigned:
        note_once(f"note: {source}: {listed(unassigned)} left out: the names tell no split.")
    return {role: _choose_tables(paths) for role, paths in by_role.items()}


def file_version(file: str) -> str:
    """Return text that changes when the file or its manifest does, such as a hash of the times."""
    with access_errors(file):
        filesystem, path = fsspec.url_to_fs(file)
        manifest = file.endswith(TAR_SUFFIXES) and nemo_manifest(file)
        return " ".join(str(filesystem.ukey(part)) for part in (path, manifest) if part)


def _write_audio(folder: Path, content: bytes, path: str) -> Path:
    file = _audio_file(folder, content, path)
    with disk_errors(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return file


def _fetch_audio(file: str, audio_folder: Path, name: str) -> str | Excluded:
    """Return the path of the audio that a row of ``file`` names; fetch remote audio first.

    A row of a remote file can only name files that are reached in the same way.
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
    protocol = url.partition("://")[0]
    return "http" if protocol == "https" else protocol
