"""Find and read tables, files with embedded audio, and folders and URLs of them.

A table names files. Parquet, Arrow and tars have embedded audio, unless their rows name files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.audio.io import encode_audio, file_or_array, to_samples
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import listed, note_once, short_value
from sbkit.base.user_folders import cache_folder, expand_home, make_cache_folder
from sbkit.data.annotations import read_table_or_annotations
from sbkit.data.audio_tables import (
    AudioTable,
    add_partition,
    has_audio,
    is_tar,
    name_classes,
    read_paths,
)
from sbkit.data.cache import CORPORA_FOLDER
from sbkit.data.columns import ROLE_OF, find_columns
from sbkit.data.filesystem import access_errors, disk_errors
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.tables import (
    DATA_ROOT,
    Table,
    TableOptions,
    audio_folder,
    is_missing,
    locate,
    locate_clip,
    read_text_column,
    require_column,
    to_manifest,
)

ARROW_SUFFIXES = (".parquet", ".arrow")
TABLE_FORMATS = "CSV, TSV, JSON Lines, parquet, Arrow, tars, .eaf or .TextGrid"
TABLE_PATTERN = re.compile(
    r"\.(parquet|arrow|tar|tar\.gz|tgz|eaf|[Tt]ext[Gg]rid|"
    r"(jsonl|csv|tsv|json)(\.gz|\.bz2|\.xz|\.zst)?)$"
)
# A role in a name; see https://huggingface.co/docs/hub/datasets-file-names-and-splits
ROLE_NAME = re.compile(rf"(?<![^\W\d_])({'|'.join(ROLE_OF)})(?![^\W\d_])")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.tsv")  # in a folder of clips
STATE_FILE = "state.json"  # names the files of a dataset that `save_to_disk` wrote
VERSION_KEYS = (  # in the information that fsspec returns about a file
    *("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated"),
    "created",
)
TARRED_COLUMN = "shard_id"  # in manifests of NeMo: the number of the tar with the audio
MAX_TRIED_FILES = 10  # of a table that may be such a manifest
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"  # stands for a missing value in the name of a folder
HUDI_FOLDER = ".hoodie"
LAKE_LOG = re.compile(r"/(_delta_log/[^/]+|metadata/[^/]+\.metadata)\.json$")
LAKE_LINES = {  # code that lists the current files of a table, by the folder of its log
    "_delta_log": "from deltalake import DeltaTable; print(*DeltaTable({folder!r}).file_uris())",
    "metadata": "from pyiceberg.table import StaticTable; print(*(task.file.file_path for task in "
    "StaticTable.from_metadata({log!r}).scan().plan_files()))",
}
FILE_BYTES = 1 << 25  # size of a file of stored rows
STREAMED_ROWS = 16  # of a dataset, in memory at a time
AUDIO_KEYS = frozenset({"array", "bytes", "path"})  # of audio in rows of `datasets`


@dataclass(frozen=True)
class SourceFile:
    """A file that a user names, or a file in a folder or below a URL."""

    path: str  # or URL
    version: str = ""  # its size and etag or time
    folders: tuple[str, ...] = ()  # between the source and the file

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def partition(self) -> dict[str, str]:
        """The keys in the names of folders, as Hive and Spark write them: lang=de."""
        keys = dict(folder.split("=", 1) for folder in self.folders if "=" in folder)
        return {key: "" if value == HIVE_NULL else unquote(value) for key, value in keys.items()}


def find_files(source: str) -> list[SourceFile]:
    """Return a file, or the tables in a folder or below a URL, from one listing."""
    if "://" not in source:  # a folder with a table may have a million clips, so is not listed
        metadata = (Path(source, name) for name in METADATA_FILES)
        source = str(next(filter(Path.is_file, metadata), source))
    with access_errors(source):
        system, root = fsspec.url_to_fs(source)
        infos: dict[str, dict[str, Any]] = {}
        if "://" not in source or TABLE_PATTERN.search(root):
            info = system.info(root)
            if info["type"] == "file":
                return [SourceFile(source, _version(info))]
        infos = system.find(root, detail=True)
    files: list[SourceFile] = []
    for path, info in sorted(infos.items()):
        folders = path.removeprefix(root).strip("/").split("/")[:-1]
        url = path if "://" not in source else system.unstrip_protocol(path)
        files.append(SourceFile(url, _version(info), tuple(folders)))
    if logs := [file.path for file in files if LAKE_LOG.search(file.path)]:
        log = max(logs, key=lambda path: (len(path), path))  # the newest
        folder, kind, _ = log.rsplit("/", 2)
        raise DataError(
            f"{folder} is a table of Delta or Iceberg, and its folder also has deleted rows. Purge "
            "rows that are only marked as deleted (deletion vectors), and name the current files, "
            f"which this code lists: {LAKE_LINES[kind].format(folder=folder, log=log)}"
        )
    if any(f"/{HUDI_FOLDER}/" in file.path for file in files):
        raise DataError(
            f"{source} has a Hudi table, and its folder also has deleted rows. Write the current "
            "rows to parquet files, and name these."
        )
    for state in [file.path for file in files if file.name == STATE_FILE]:
        with access_errors(state), fsspec.open(state, "r") as content:
            current = {entry["filename"] for entry in json.load(content)["_data_files"]}
        folder = state.removesuffix(STATE_FILE)
        files = [f for f in files if f.name in current or not f.path.startswith(folder)]
    tables = [
        file
        for file in files
        if TABLE_PATTERN.search(file.path)
        and not any(part.startswith(("_", ".")) for part in (*file.folders, file.name))
    ]
    if not tables:
        raise DataError(f"{source} has no {TABLE_FORMATS}.", file=source)
    return tables


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(str(info[key]) for key in VERSION_KEYS if info.get(key))


def choose_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the tars, or else the tables; JSON files, which may describe tables, come last."""
    tars = [file for file in files if is_tar(file.name)]
    tables = [file for file in files if not re.search(r"\.json(\.\w+)?$", file.name)]
    return tars or tables or [*files]


def find_splits(source: str, files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Return the files of a folder by the role in their path; a single named table has no role.

    The outermost folder with a role in its name decides, then the name of the file. A name with
    two roles does not count.
    """
    by_role: dict[str, list[SourceFile]] = {}
    for file in files if [file.path for file in files] != [source] else ():
        names = (*file.folders, file.name)
        roles = [{ROLE_OF[word] for word in ROLE_NAME.findall(name.lower())} for name in names]
        role = next((min(name_roles) for name_roles in roles if len(name_roles) == 1), "")
        by_role.setdefault(role, []).append(file)
    unassigned = [file.path for file in by_role.pop("", []) if not file.name.endswith(".json")]
    if by_role and unassigned:
        note_once(f"note: {source}: {listed(unassigned)} left out: the names have no split.")
    return {role: choose_files(files) for role, files in by_role.items()}


def read_files(
    files: Sequence[tuple[SourceFile, TableOptions]],
) -> list[Manifest | AudioTable]:
    """Return the rows of tables as one manifest, and the files with embedded audio."""
    manifests: list[tuple[str, Manifest]] = []
    audio_tables: list[Manifest | AudioTable] = []
    is_embedded: dict[str, bool] = {}  # at URLs, decided by the first file of a folder and suffix
    for file, options in files:
        group = file.path.rpartition("/")[0] if "://" in file.path else file.path
        group += Path(file.name).suffix
        if group not in is_embedded:
            is_arrow = file.path.endswith(ARROW_SUFFIXES)
            is_embedded[group] = has_audio(file.path, options) if is_arrow else is_tar(file.path)
        if is_embedded[group]:
            audio_tables.append(AudioTable(file.path, file.version, options, file.partition))
        else:
            manifests.append((file.name, _read_manifest(file, options)))
    bases = [Path(file.path).parent for file, _ in files[:1]]
    return [*([Manifest.join_named(manifests, *bases)] if manifests else []), *audio_tables]


def _read_manifest(file: SourceFile, options: TableOptions) -> Manifest:
    if file.path.endswith(ARROW_SUFFIXES):
        table = read_paths(file.path, options)
    else:
        table = read_table_or_annotations(file.path, options)
    table = add_partition(table, file.partition)
    if "://" in file.path:
        find_audio = partial(locate, file.path.rpartition("/")[0])
        _require_untarred(table, options, find_audio)
        return to_manifest(table, options, find_audio)
    path = options.find(table.rows.column_names, "path", table.file)
    folder = audio_folder(table, path)
    is_used = path and pc.any(pc.match_substring_regex(table.rows[path], DATA_ROOT.pattern)).as_py()
    if options.data_root and not is_used:
        raise ConfigError(
            f"`data_folder` replaces $data_root, but no path in {file.path} begins with $data_root."
        )
    find_audio = partial(locate, folder, data_root=options.data_root)
    if folder != Path(file.path).parent:
        find_audio = partial(locate_clip, folder)
    _require_untarred(table, options, find_audio)
    return to_manifest(table, options, find_audio, folder)


def _require_untarred(
    table: Table, options: TableOptions, find_audio: Callable[[str], str | Excluded]
) -> None:
    """Raise DataError for a manifest of NeMo whose audio is in tars that were not unpacked."""
    if TARRED_COLUMN not in table.rows.column_names or ".json" not in table.file:
        return
    names = read_text_column(table.rows, require_column(table, options, "path"))[:MAX_TRIED_FILES]
    for audio in map(str, map(find_audio, names)):
        with access_errors(audio):
            system, path = fsspec.url_to_fs(audio)
            if system.exists(path):
                return
    name = next(iter(names), "its audio")
    raise DataError(
        f"{table.file} is a tarred manifest of NeMo: by its column `{TARRED_COLUMN}`, {name} is in "
        "a tar, but a table names files. Unpack the tars into the folder of the manifest, with "
        "`tar -xf audio_0.tar` for each.",
        file=table.file,
    )


# ---- rows in memory, cached as parquet


def store_rows(rows: Any) -> Path:
    """Store rows with the columns of a table, and return the folder of their files.

    rows: an iterable of mappings, a pandas DataFrame, or a dataset of `datasets`, which may be
        streamed. Audio is a path, or anything else that `stream_input` takes. Paths are relative
        to the working folder.

    >>> clip = {"array": [0.0] * 800, "sampling_rate": 16_000}
    >>> [file.name for file in store_rows([{"audio": clip, "text": "nothing"}]).iterdir()]
    ['00000.parquet']
    """
    digest = hashlib.sha256()
    with disk_errors(cache_folder()):
        corpora = make_cache_folder(CORPORA_FOLDER)
        with TemporaryDirectory(prefix=".rows-", dir=corpora) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            for number, batch in enumerate(_batch(map(_to_stored, _to_records(rows)))):
                file = new / f"{number:05}.parquet"
                try:
                    # Not Table.from_pylist, which drops the columns that the first row lacks
                    table = pa.Table.from_struct_array(pa.array(batch, from_pandas=True))
                except pa.ArrowException as error:
                    raise DataError(f"The rows cannot be stored in a table: {error}") from error
                pq.write_table(table, file)
                digest.update(file.read_bytes())
            if not any(new.iterdir()):
                raise DataError("There are no rows.")
            folder = corpora / f"rows-{digest.hexdigest()[:16]}"
            if not folder.exists():
                new.rename(folder)
    return folder


def _batch(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        batch.append(row)
        audio = (value for value in row.values() if isinstance(value, Mapping))
        size += 100 + sum(len(value.get("bytes") or b"") for value in audio)
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _to_records(rows: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        for name, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Audio):
                rows = rows.cast_column(name, datasets.Audio(decode=False))
        if not (isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom"):
            tables = map(name_classes, rows.with_format("arrow").iter(STREAMED_ROWS))
            rows = chain.from_iterable(table.to_pylist() for table in tables)
    elif hasattr(rows, "iterrows"):  # a DataFrame
        rows = rows.to_dict("records")
    for record in rows if isinstance(rows, Iterable) else [rows]:
        if not isinstance(record, Mapping):
            raise DataError(
                "Rows must be mappings, a DataFrame or a datasets.Dataset, but one row is "
                f"{short_value(record)}."
            )
        yield record


def _to_stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with arrays encoded as WAV, and with absolute paths."""
    row = {str(column): value for column, value in record.items()}
    paths = find_columns([*row], "path")
    for name, value in row.items():
        keys = AUDIO_KEYS & value.keys() if isinstance(value, Mapping) else ()
        if name in paths or keys or hasattr(value, "get_all_samples"):
            contents = [value[key] for key in keys] or [value]
            row[name] = None if all(map(is_missing, contents)) else _to_file(value)
    return row


def _to_file(audio: Any) -> str | dict[str, Any]:
    """Return the absolute path of audio, or its content as `datasets` stores it."""
    source, rate = file_or_array(audio)
    if isinstance(source, str):
        path = expand_home(source)
        return path if "://" in path else str(Path(path).absolute())
    if rate is not None:
        return {"bytes": encode_audio(to_samples(source), rate, "WAV"), "path": None}
    return {
        "bytes": source.read(),
        "path": audio.get("path") if isinstance(audio, Mapping) else None,
    }
