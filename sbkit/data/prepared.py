"""Prepare a corpus: rows and decoded audio in one folder, in the cache or at a chosen place.

corpus.json                 its splits and its shards; in the cache, the inputs it was made from
SPLIT.arrow                 rows: id, sentence, samples, other columns, the location of the audio
NAME.clips, NAME.parquet    shards of audio (`sbkit.data.shard`)
files.arrow                 the path, size and time of each audio file
facts/                      values computed from rows (`sbkit.data.facts`)

    spec = Spec.of("hparams/ctc.yaml", {"data_folder": "/data/fr"}, "s3://bucket/fr")
    plan(spec) -> units; write(unit) -> shards, by any process anywhere; finish(spec) -> rows

A run prepares its corpus in the cache. The name of that folder follows from the keys that decide
how a file is decoded, the names, sizes and times of the tables, and the code. The folder has rows
for several values of other keys, such as `splits` and `where`: SPLIT-KEYS.arrow, files-KEYS.arrow,
and rows-KEYS.json, which is like the corpus.json of --out.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import MemoryMappedTable

from sbkit.audio.io import decoding_versions
from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import (
    from_plain,
    remove_abandoned,
    task_lock,
    temporary_path,
    to_json,
    write_bytes_atomically,
)
from sbkit.base.machine import usable_cores
from sbkit.base.messages import plural
from sbkit.base.user_folders import cache_folder, make_cache_folder
from sbkit.base.versions import data_versions
from sbkit.config.hparams import Settings, read_spec
from sbkit.config.keys import KEYS, require_values, with_defaults
from sbkit.data.audio_tables import AudioTable
from sbkit.data.cache import CORPORA_FOLDER, CORPUS_FILE, ENCODING, ROWS_VERSION, texts_in
from sbkit.data.corpus import Corpus, SettingValues, corpus_of
from sbkit.data.filesystem import Storage, disk_errors
from sbkit.data.manifest import Excluded, Manifest
from sbkit.data.rows import (
    FILES_NAME,
    PreparedSplit,
    RowWriter,
    Shards,
    StoredClips,
    are_current,
    is_located,
    manifests_of,
    map_rows,
    read_row_blocks,
)
from sbkit.data.shard import AUDIO, LAZY, is_whole, read_shard_tables
from sbkit.data.work_units import (
    FILES_SCHEMA,
    RowBlocks,
    Unit,
    WorkUnit,
    list_shards,
    plan_units,
    short_digest,
    stat_files,
    write_units,
)
from sbkit.data.work_units import write as write
from sbkit.logs.progress import progress_bar

CORPUS_FORMAT = 7
UNSAFE_CHARS = re.compile(r"[^\w.+-]+")  # in the name of a folder
UNIT_CLIPS, MIN_UNIT_CLIPS = 1000, 250  # 1000 clips of 5 s at 16 kHz take 160 MB
UNITS_PER_CORE = 4  # for a small corpus
# Keys that decide which audio there is
SOURCE_KEYS = ("corpus", "data_folder", "manifest", "columns", "encoding", "tier")
# All keys that corpora and filters may read
DATA_KEYS = (*(name for name, key in KEYS.items() if "rows" in key.affects), "audio_store")

logger = logging.getLogger(__name__)


class DataSettings(Settings):
    """The values of `DATA_KEYS`; reading another key, which no digest covers, is an error."""

    def __init__(self, settings: SettingValues) -> None:
        super().__init__({name: settings[name] for name in DATA_KEYS if name in settings})
        self._other_names = {*settings} - {*DATA_KEYS}

    def __getitem__(self, name: str) -> Any:
        if name in self._other_names:
            raise ConfigError(
                f"A corpus with a method `files` may read only {', '.join(DATA_KEYS)}, but this "
                f"one reads `{name}`. Remove `files`; then the corpus is read at each start."
            )
        return super().__getitem__(name)


def split_fingerprint(digest: str, role: str, index: int) -> str:
    """Return a hash of a split and its place in a run; training splits are joined in order."""
    return short_digest([digest, role, index * (role == "train")])


class PreparedData(NamedTuple):
    """The splits of a corpus."""

    roles: Mapping[str, Sequence[str]]  # the names of the splits of each role
    splits: Mapping[str, PreparedSplit]


@dataclass(frozen=True)
class CorpusRecord:
    """The index of a prepared corpus: corpus.json of --out, or rows-KEYS.json in the cache.

    splits: the facts that `RowWriter.write` returns.
    shards: the sizes of their audio files in bytes, by name.
    settings: in the cache, the values of `DATA_KEYS`.
    """

    format: int
    about: Mapping[str, str | None]
    sample_rate: int
    roles: Mapping[str, Sequence[str]]
    splits: Mapping[str, Mapping[str, Any]]
    shards: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read a file; raises ValueError if it is damaged."""
        return from_plain(cls, json.loads(content.decode(**ENCODING)))

    def require_shards(self, storage: Storage) -> None:
        """Raise DataError unless all shards are there, with audio files of these sizes."""
        tables = [f"{name.removesuffix('.clips')}.parquet" for name in self.shards]
        expected = {**self.shards, **dict.fromkeys(tables)}
        sizes = storage.listed_sizes([*expected])
        for (name, stated), size in zip(expected.items(), sizes, strict=True):
            if size is None or stated not in (size, None):
                state = "is missing" if size is None else f"has {size} bytes instead of {stated}"
                raise DataError(
                    f"{storage.url_of(name)} {state}. `sbkit prepare --verify {storage.url}` lists "
                    "damaged shards, and `sbkit prepare YAML --out` writes missing ones again."
                )


# ---- at a place of the user's choice, by any number of processes


@dataclass(frozen=True)
class Spec:
    """The work of preparing a corpus, and its target, as plain values.

    settings: the values of `DATA_KEYS`.
    out: a folder or a URL.
    """

    settings: Mapping[str, Any]
    out: str

    def __post_init__(self) -> None:
        if self.settings.get("audio_store") == LAZY:
            raise ConfigError(
                "A corpus with --out stores its audio. Set `audio_store: flac` or pcm."
            )

    @classmethod
    def of(cls, yaml_file: str | Path, overrides: Mapping[str, object], out: str) -> "Spec":
        """Read a YAML; overrides are values by key, such as {"data_folder": "/data/fr"}."""
        settings = read_data_settings(Path(yaml_file), overrides)
        return cls({name: settings[name] for name in DATA_KEYS if name in settings}, out)

    def read(self) -> tuple[Corpus, RowBlocks]:
        """Read the corpus; raise ConfigError if it is prepared already."""
        corpus = corpus_of(DataSettings(self.settings))
        row_blocks = read_row_blocks(corpus)
        items = chain.from_iterable(row_blocks.values())
        if any(isinstance(item, Manifest) and is_located(item) for item in items):
            raise ConfigError(
                f"`data_folder`: {self.settings['data_folder']} names a corpus that `sbkit prepare "
                "--out` has written. Copy its folder, or name the data that it was prepared from."
            )
        return corpus, row_blocks


def read_data_settings(yaml_file: Path, overrides: Mapping[str, object]) -> Settings:
    """Read the values of a YAML; this imports neither its recipe nor torch."""
    settings = read_spec(yaml_file, overrides).settings
    require_values(settings)
    return settings


def plan(spec: Spec) -> list[Unit]:
    """Return the work as units, which any process may `write` in any order.

    >>> ray.data.from_items(plan(spec)).map(write).materialize()  # doctest: +SKIP
    """
    out = Storage(spec.out).url  # absolute: processes may have other working folders
    _, row_blocks = spec.read()
    return [*plan_units(row_blocks, unit_template(spec.settings), out, UNIT_CLIPS)]


def finish(spec: Spec) -> list[str]:
    """Write the rows and the index; if units are missing, return their names instead."""
    storage, template = Storage(spec.out), unit_template(spec.settings)
    corpus, row_blocks = spec.read()
    units = plan_units(row_blocks, template, storage.url, UNIT_CLIPS)
    num_clips = {WorkUnit.of(unit).name: unit["clips"] for unit in units}
    names = list_shards(storage)
    if missing := [unit for unit in num_clips if not names.get(unit)]:
        return missing
    shards = Shards(storage, template, {unit: names[unit] for unit in num_clips}, is_numbered=True)
    clips = StoredClips.collect(shards, filter(num_clips.get, num_clips), _stat_clips(row_blocks))
    _write_rows(corpus, row_blocks, shards, clips, CORPUS_FILE)
    return []


def verify(location: str) -> int:
    """Read all audio of a corpus; log the tables of damaged shards, and return their number."""
    storage = Storage(location)
    names = [*chain.from_iterable(list_shards(storage).values())]
    if not names:
        raise DataError(f"{storage.url} has no shards of `sbkit prepare --out`.")
    num_damaged = 0
    sizes = storage.listed_sizes([f"{name}.clips" for name in names])
    with progress_bar("verifying shards", len(names)) as advance:
        for name, size in zip(names, sizes, strict=True):
            if not is_whole(storage, name, size):
                num_damaged += 1
                logger.info(storage.url_of(f"{name}.parquet"))
            advance(1)
    logger.info(f"{plural(num_damaged, 'damaged shard')} in {storage.url}")
    if num_damaged:
        logger.info("Remove the tables above. `sbkit prepare YAML --out` writes them again.")
    return num_damaged


def unit_template(settings: SettingValues) -> WorkUnit:
    """Return a work unit without content, with the facts that all units of a corpus share."""
    return WorkUnit("", settings["sample_rate"], with_defaults(settings)["audio_store"])


def _paths_of(row_blocks: RowBlocks) -> pa.ChunkedArray:
    """Return the paths of all clips in files, not in prepared corpora or tables with audio."""
    paths = [manifest.rows[AUDIO].cast(pa.large_binary()) for manifest in manifests_of(row_blocks)]
    chunks = chain.from_iterable(column.chunks for column in paths)
    return pa.chunked_array([*chunks], pa.large_binary())


def _stat_clips(row_blocks: RowBlocks) -> pa.Table:
    return stat_files(pc.unique(_paths_of(row_blocks)))


def _write_rows(
    corpus: Corpus,
    row_blocks: RowBlocks,
    shards: Shards,
    clips: StoredClips,
    record_file: str,
    *,
    ending: str = "",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the rows of all splits, the list of their files, and the record of both.

    ending: the end of the file names, before the suffix.
    settings: for the record.
    """
    storage = shards.storage
    with TemporaryDirectory() as scratch, disk_errors(storage.folder or scratch):
        writer = RowWriter(shards, clips, storage.folder or Path(scratch), ending)
        splits = writer.write(corpus, row_blocks)
        for split, facts in splits.items():
            facts["sha256"] = checksum(writer.folder / f"{split}{ending}.arrow")
        for file in Path(scratch).iterdir():
            storage.move_in(file, file.name)
        record = CorpusRecord(
            format=CORPUS_FORMAT,
            about=corpus.describe(),
            sample_rate=shards.template.sample_rate,
            roles=corpus.roles(),
            splits=splits,
            shards={k: size for k, size in shards.sizes.items() if k in writer.shard_names},
            settings=dict(settings),
        )
        storage.write(record_file, to_json(asdict(record)).encode(**ENCODING))


# ---- in the cache, for a run


def prepare(
    settings: SettingValues, corpus: Corpus | None = None, *, again: bool = False
) -> PreparedData:
    """Return the rows of a run's corpus; decode the needed clips that the cache lacks.

    One process prepares, and others wait for it. A corpus without `files` is read at each call.

    corpus: by default, the corpus that the settings choose.
    again: read all audio files again.
    """
    settings = with_defaults(settings)
    corpus = corpus or corpus_of(settings)
    tables = corpus.state()
    row_blocks: RowBlocks | None = None
    if tables is None:
        row_blocks = read_row_blocks(corpus)
        keys: Mapping[str, object] = {
            "roles": corpus.roles(),
            "where": settings["where"],
            "rows": {split: [*map(_describe_rows, items)] for split, items in row_blocks.items()},
        }
    else:
        corpus.settings = DataSettings(settings)
        keys = {name: corpus.settings[name] for name in DATA_KEYS}
    folder = _CacheFolder.of(corpus, settings, tables, keys)
    # Other ranks of this machine start once the first rank has checked the files.
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not again and (data := folder.read(is_checked=is_first)):
        return data
    parent = make_cache_folder(CORPORA_FOLDER)

    def log_wait(holder: str) -> None:
        logger.info(f"Waiting for {holder}, which is preparing {folder.path}.")

    lock = task_lock(parent, folder.path.name, wait=True, on_wait=log_wait)
    with lock, disk_errors(folder.path):
        if not again and (data := folder.read(is_checked=True)):  # another process was first
            return data
        folder.write(corpus, row_blocks, again=again)
    data = folder.read(is_checked=False)
    if data is None:
        raise DataError(f"{folder.path} was removed while it was prepared. Start again.")
    return data


def _describe_rows(item: Manifest | AudioTable) -> object:
    """Return plain data that changes with the rows of a block, also with those left out."""
    if isinstance(item, AudioTable):
        return asdict(item)
    digest = hashlib.sha256()
    for block in item.blocks():
        content = pa.BufferOutputStream()
        table = block.rows.combine_chunks()
        with pa.ipc.new_stream(content, table.schema) as writer:
            writer.write_table(table)
        digest.update(content.getvalue())
    return [digest.hexdigest(), [*map(asdict, item.excluded)], dict(item.filtered)]


@dataclass(frozen=True)
class _CacheFolder:
    """The folder of a corpus in the cache, and the rows of a run there.

    keys_digest: of the values of `DATA_KEYS`, or of the roles and rows of the splits.
    made_from: the inputs that decide the audio, as plain data.
    template: a work unit without content.
    settings: the values of `DATA_KEYS`.
    """

    path: Path
    keys_digest: str
    made_from: Mapping[str, object]
    template: WorkUnit
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, corpus: Corpus, settings: SettingValues, tables: object, keys: object
    ) -> "_CacheFolder":
        # The next command, or `cache prune`, may run in another working folder.
        source = {name: _with_absolute_paths(settings[name]) for name in SOURCE_KEYS}
        template = unit_template(settings)
        made_from = {
            "source": source,
            "audio": {
                "sample_rate": template.sample_rate,
                "store": template.store,
                **decoding_versions(),
            },
            "tables": tables,
            "modules": corpus.sources(),
            "code": {"rows": ROWS_VERSION, **data_versions()},
        }
        folders = " and ".join(Path(text).name for text in texts_in(settings["data_folder"]))
        about = corpus.describe()["name"] or folders or "tables"
        name = f"{about}-{short_digest(made_from['audio'])}-{short_digest(made_from)}"
        path = cache_folder() / CORPORA_FOLDER / UNSAFE_CHARS.sub("-", name).lstrip("-.")
        values = {name: settings[name] for name in DATA_KEYS} | source
        return cls(path, short_digest(keys), made_from, template, values)

    @property
    def ending(self) -> str:
        """The end of the names of this run's files, before the suffix."""
        return f"-{self.keys_digest}"

    @property
    def record_name(self) -> str:
        return f"rows{self.ending}.json"

    def read(self, *, is_checked: bool) -> PreparedData | None:
        """Return the rows; None if there are none, or if an audio file has changed.

        is_checked: whether to check the files.
        """
        datasets.disable_progress_bars()
        splits: dict[str, PreparedSplit] = {}
        try:
            record = CorpusRecord.parse((self.path / self.record_name).read_bytes())
            for name, facts in record.splits.items():
                rows = map_rows(self.path / f"{name}{self.ending}.arrow", facts["rows"])
                dataset = datasets.Dataset(rows, fingerprint=facts["fingerprint"])
                excluded = [Excluded(**row) for row in facts["excluded"]]
                splits[name] = PreparedSplit(dataset, excluded, facts["digest"], facts["filtered"])
            if is_checked:
                record.require_shards(Storage(self.path))
                if not self._is_current():
                    return None
        except (OSError, ValueError, LookupError):  # it is not there, or damaged
            return None
        except DataError as error:
            logger.warning(f"{error} The clips are decoded again.")
            return None
        return PreparedData(record.roles, splits)

    def _is_current(self) -> bool:
        before = MemoryMappedTable.from_file(str(self.path / f"{FILES_NAME}{self.ending}.arrow"))
        is_same = are_current(stat_files(before.table["path"]), before.table)
        num_changed = len(is_same) - (pc.sum(is_same).as_py() or 0)
        if num_changed:
            changed = plural(num_changed, "audio file")
            logger.info(
                f"{changed} of {len(is_same)} changed, appeared or disappeared; rows are prepared "
                "again"
            )
        return num_changed == 0

    def write(self, corpus: Corpus, row_blocks: RowBlocks | None, *, again: bool) -> None:
        """Decode missing clips, and write the rows."""
        for table in (*self.path.glob("*.parquet"), *self.path.glob("rows-*")) if again else ():
            table.unlink()  # not the audio, which a run may be reading
        self.path.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path)
        made_from = to_json({"made_from": self.made_from}).encode(**ENCODING)
        write_bytes_atomically(self.path / CORPUS_FILE, made_from)
        is_stream = self.template.store == LAZY or corpus.has_audio
        row_blocks = row_blocks or read_row_blocks(corpus, as_stream=is_stream)
        files = FILES_SCHEMA.empty_table() if is_stream else _stat_clips(row_blocks)
        shards, clips = self._find_clips(files)
        stages = (self._write_missing,) if again else (self._take_over, self._write_missing)
        for add_shards in () if is_stream else stages:
            missing = {split: [*map(clips.missing, items)] for split, items in row_blocks.items()}
            if add_shards(missing, files):
                shards, clips = self._find_clips(files)
        record_name, settings = self.record_name, self.settings
        _write_rows(
            corpus, row_blocks, shards, clips, record_name, ending=self.ending, settings=settings
        )

    def _find_clips(self, files: pa.Table) -> tuple[Shards, StoredClips]:
        """Read the tables of all shards; remove tables of damaged audio files."""
        storage = Storage(self.path)
        prefix = f"{CORPORA_FOLDER}/{self.path.name}/"
        shards = Shards(storage, self.template, list_shards(storage), prefix=prefix)
        clips = StoredClips.collect(shards, None, files)
        sizes = storage.listed_sizes([*shards.sizes])
        stated = zip(shards.sizes.items(), sizes, strict=True)
        damaged = [name for (name, expected), size in stated if size != expected]
        for name in damaged:  # its clips are decoded again
            (self.path / name).with_suffix(".parquet").unlink()
        return self._find_clips(files) if damaged else (shards, clips)

    def _plan(self, missing: RowBlocks) -> list[Unit]:
        """Return the units of missing clips and of tables that have no shards yet."""
        num_clips = sum(len(manifest) for manifest in manifests_of(missing))
        per_core = num_clips // (UNITS_PER_CORE * usable_cores())
        unit_clips = min(max(per_core, MIN_UNIT_CLIPS), UNIT_CLIPS)
        shards = list_shards(Storage(self.path))
        units = plan_units(missing, self.template, str(self.path), unit_clips)
        return [unit for unit in units if not shards.get(WorkUnit.of(unit).name)]

    def _write_missing(self, missing: RowBlocks, files: pa.Table) -> bool:
        """Decode missing clips; return whether any are missing."""
        units = self._plan(missing)
        write_units(units, "decoding audio")
        return bool(units)

    def _take_over(self, missing: RowBlocks, files: pa.Table) -> bool:
        """Link shards with missing audio from similar folders; return whether there are any."""
        tables = {WorkUnit.of(unit).name for unit in self._plan(missing) if not unit["clips"]}
        missing_files = files.filter(pc.is_in(files["path"], value_set=_paths_of(missing)))
        if not tables and not len(missing_files):
            return False
        num_linked = 0
        similar_folders = self.path.parent.glob(f"*-{short_digest(self.made_from['audio'])}-*")
        for folder in {*similar_folders} - {self.path}:
            storage = Storage(folder)
            for unit, names in list_shards(storage).items():
                for shard in read_shard_tables(storage, names):
                    clips = pa.Table.from_struct_array(shard.stored[AUDIO])
                    if unit in tables or pc.any(are_current(missing_files, clips)).as_py():
                        num_linked += 1
                        for suffix in (".clips", ".parquet"):  # a shard is complete with its table
                            _link(folder / f"{shard.name}{suffix}", self.path)
        return num_linked > 0


def _with_absolute_paths(value: Any) -> Any:
    """Make all paths in a value of a YAML absolute."""
    if isinstance(value, Mapping):
        return {key: _with_absolute_paths(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_with_absolute_paths(inner) for inner in value]
    if isinstance(value, str | Path) and (path := Path(value).expanduser()).exists():
        return str(path.absolute())
    return value


def _link(file: Path, folder: Path) -> None:
    """Link a file into a folder; copy it if the file system has no links."""
    target = folder / file.name
    if target.exists():
        return
    try:
        target.hardlink_to(file)
    except OSError:
        temporary = temporary_path(target)
        shutil.copyfile(file, temporary)
        temporary.replace(target)
