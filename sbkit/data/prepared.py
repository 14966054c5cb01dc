"""A prepared corpus: rows and decoded audio in one folder, in the cache or where the user says.

corpus.json                 what it was made from; with --out, its splits and its shards as well
SPLIT.arrow                 rows: id, sentence, samples, other columns, the place of the audio
NAME.arrow, NAME.parquet    shards of audio (`sbkit.data.shard`)
files.arrow                 the path, size and time of each audio file
facts/                      what is computed from rows (`sbkit.data.facts`)

    spec = Spec.of("hparams/ctc.yaml", {"data_folder": "/data/fr"}, "s3://bucket/fr")
    plan(spec) -> units; write(unit) -> shards, by any process anywhere; finish(spec) -> rows

A run prepares its corpus in the cache. The name of that folder follows from the keys that decide
how a file is decoded, the names, sizes and times of the tables, and the code. Rows for other keys,
such as `splits` and `where`, lie beside each other there: SPLIT-KEYS.arrow and rows-KEYS.json.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.checksums import checksum
from sbkit.base.code_versions import audio_state, code_state
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import (
    remove_abandoned,
    task_lock,
    temporary_path,
    to_json,
    write_bytes_atomically,
)
from sbkit.base.imports import search_folders
from sbkit.base.machine import usable_cores
from sbkit.base.messages import plural
from sbkit.base.ranges import RANGES, Kind, Range, require_in_range
from sbkit.base.user_folders import cache_folder
from sbkit.config.document import read_document
from sbkit.config.hparams import Settings, read_settings
from sbkit.config.overrides import nest_overrides
from sbkit.data.audio_tables import AudioTable
from sbkit.data.cache import CORPORA_FOLDER, CORPUS_FILE, ENCODING
from sbkit.data.corpus import Corpus, SettingValues, corpus_of
from sbkit.data.filesystem import Storage, disk_errors
from sbkit.data.manifest import Manifest
from sbkit.data.rows import (
    Clips,
    Locator,
    PreparedSplit,
    RowWriter,
    are_current,
    is_located,
    manifests_of,
    read_sources,
    read_split,
)
from sbkit.data.shard import AUDIO, LAZY, STORES, check_audio, read_shard_tables
from sbkit.data.units import (
    FILES,
    Sources,
    Unit,
    Work,
    digest_of,
    list_shards,
    plan_units,
    stat_files,
    write_units,
)
from sbkit.data.units import write as write
from sbkit.logs.progress import progress_bar

FILES_FILE = "files.arrow"
FORMAT = 4
UNUSUAL = re.compile(r"[^\w.+-]+")  # characters in the name of a folder
SHARD_BYTES = 10**9
UNIT_CLIPS, MIN_UNIT_CLIPS = 1000, 250  # in a unit; 160 MB if 1000 last 5 s at 16 kHz
UNITS_PER_CORE = 4  # of a small corpus
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)")
UNIT_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
DATA_RANGES = {
    "sample_rate": Range(low=1000, high=384_000, integer=True, advice="16000 is usual."),
    "audio_store": Kind(
        STORES, advice="pcm is fast; flac takes 60 % of its space; lazy none, but needs durations."
    ),
}
# Which audio there is; those of `AUDIO_KEYS` say how it is kept.
SOURCE_KEYS = ("corpus", "data_folder", "manifest", "columns", "encoding")
AUDIO_KEYS = ("sample_rate", "audio_store")
# All that corpora and filters read
DATA_KEYS = (
    *(*SOURCE_KEYS, *AUDIO_KEYS),
    *("splits", "split_shares", "language", "where", "skip_quality_tags"),
)

logger = logging.getLogger(__name__)


class DataSettings(Settings):
    """The values of `DATA_KEYS`; another key of the YAML would decide stored rows."""

    def __init__(self, settings: SettingValues) -> None:
        super().__init__({name: settings[name] for name in DATA_KEYS if name in settings})
        self._other_names = {*settings} - {*DATA_KEYS}

    def get(self, name: str, default: object = None) -> Any:
        if name in self._other_names:
            raise ConfigError(
                f"A corpus with a method `files` may read {', '.join(DATA_KEYS)}, but this one "
                f"reads `{name}`. Take `files` out of it; then it is read at each start."
            )
        return super().get(name, default)

    def __missing__(self, name: str) -> NoReturn:
        self.get(name)
        super().__missing__(name)


class PreparedData(NamedTuple):
    """The splits of a corpus."""

    roles: Mapping[str, Sequence[str]]  # the names of the splits of each role
    splits: Mapping[str, PreparedSplit]


# Where the user says, by any number of processes


@dataclass(frozen=True)
class Spec:
    """What is prepared, and where; of plain values.

    settings: the values of `DATA_KEYS`.
    out: a folder or a URL.
    shard_bytes: most audio of a shard, but for one long recording.
    """

    settings: Mapping[str, Any]
    out: str
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.settings.get("audio_store") == LAZY:
            raise ConfigError(
                "A corpus with --out holds its audio. Set `audio_store: flac` or pcm."
            )

    @classmethod
    def of(
        cls,
        yaml_file: str | Path,
        overrides: Mapping[str, object],
        out: str,
        shard_bytes: int = SHARD_BYTES,
    ) -> "Spec":
        """Read a YAML; overrides are values by key, such as those of `data_folder`."""
        settings = read_data_settings(Path(yaml_file), overrides)
        values = {name: settings[name] for name in DATA_KEYS if name in settings}
        return cls(values, out, shard_bytes)

    def open(self) -> Corpus:
        """Return the corpus to read."""
        return corpus_of(DataSettings(self.settings))


def read_data_settings(yaml_file: Path, overrides: Mapping[str, object]) -> Settings:
    """Read the values of a YAML; this imports neither its recipe nor torch."""
    search_folders(read_document(yaml_file).module_folders)
    settings = read_settings(yaml_file, nest_overrides(overrides))
    require_in_range(settings, {**RANGES, **DATA_RANGES})
    return settings


def plan(spec: Spec) -> list[Unit]:
    """Return the work in units, which any process may `write` in any order.

    >>> ray.data.from_items(plan(spec)).map(write).materialize()  # doctest: +SKIP
    """
    work = work_of(spec.settings, spec.shard_bytes)
    out = Storage(spec.out).url  # a path from the root: another process has another folder
    return [*plan_units(read_sources(spec.open()), work, out, UNIT_CLIPS)]


def finish(spec: Spec) -> list[str]:
    """Write the rows and the index; while units are missing, return their names instead."""
    storage, corpus = Storage(spec.out), spec.open()
    work, sources = work_of(spec.settings, spec.shard_bytes), read_sources(corpus)
    units = {
        Work.of(unit).name: unit for unit in plan_units(sources, work, storage.url, UNIT_CLIPS)
    }
    shards = list_shards(storage)
    if missing := [name for name in units if not shards.get(name)]:
        return missing
    shards = {name: shards[name] for name in units}
    files = _stat_clips(sources)
    locator = Locator(work.sample_rate, numbers={name: i for i, name in enumerate(shards, 1)})
    names = chain.from_iterable(shards[name] for name, unit in units.items() if unit["clips"])
    clips = Clips.of(read_shard_tables(storage, names), files, locator)
    with TemporaryDirectory() as scratch, disk_errors(storage.folder or scratch):
        place = storage.folder or Path(scratch)
        writer = RowWriter(place, storage, shards=shards, work=work, locator=locator, clips=clips)
        splits = writer.write(corpus, sources)
        for split, facts in splits.items():
            facts["sha256"] = checksum(place / f"{split}.arrow")
        _write_table(place / FILES_FILE, files)
        for name in (*(f"{split}.arrow" for split in splits), FILES_FILE):
            if storage.folder is None:
                storage.move_in(place / name, name)
    audio_files = [f"{name}.arrow" for name in chain.from_iterable(shards.values())]
    record = {
        **{"format": FORMAT, "about": corpus.describe(), "sample_rate": work.sample_rate},
        **{"audio_store": work.store, "roles": corpus.roles(), "splits": splits},
        "shards": dict(zip(audio_files, storage.listed_sizes(audio_files), strict=True)),
    }
    storage.write(CORPUS_FILE, to_json(record).encode(**ENCODING))
    return []


def parse_size(text: str) -> int:
    """Return the number of bytes of a size.

    >>> parse_size("1.5 MB")
    1500000
    """
    match = SIZE.fullmatch(text)
    size = int(float(match[1]) * UNIT_BYTES[match[2]]) if match else 0
    if size <= 0:
        raise ConfigError(
            f"The size of a shard must be a number and kB, MB or GB, such as 1GB, but is {text!r}."
        )
    return size


def verify(location: str) -> int:
    """Read all audio of a corpus; log the tables of damaged shards, and return their number."""
    storage = Storage(location)
    names = [*chain.from_iterable(list_shards(storage).values())]
    if not names:
        raise DataError(f"{storage.url} has no shards of `sbkit prepare --out`.")
    num_damaged = 0
    with progress_bar("verifying shards", len(names)) as advance:
        for name in names:
            try:
                (shard,) = read_shard_tables(storage, [name])
                require_sizes(storage, {f"{name}.arrow": shard.facts.bytes})
                check_audio(shard.table, storage.url_of(f"{name}.arrow"))
            except DataError:
                num_damaged += 1
                logger.info(storage.url_of(f"{name}.parquet"))
            advance(1)
    logger.info(f"{plural(num_damaged, 'damaged shard')} in {storage.url}")
    if num_damaged:
        logger.info("Remove the tables above. `sbkit prepare YAML --out` writes them again.")
    return num_damaged


def work_of(settings: SettingValues, shard_bytes: int = SHARD_BYTES) -> Work:
    """Return what all units of a corpus have in common."""
    store = str(settings.get("audio_store") or STORES[0])
    return Work("", settings["sample_rate"], store, shard_bytes)


def _stat_clips(sources: Sources) -> pa.Table:
    """Look at the files of all clips that are not in a prepared corpus or a table."""
    paths = [manifest.rows[AUDIO].cast(pa.large_binary()) for manifest in manifests_of(sources)]
    chunks = chain.from_iterable(column.chunks for column in paths)
    return stat_files(pc.unique(pa.chunked_array([*chunks], pa.large_binary())))


def _write_table(file: Path, table: pa.Table) -> None:
    content = pa.BufferOutputStream()
    with pa.ipc.new_stream(content, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    write_bytes_atomically(file, content.getvalue().to_pybytes())


# In the cache, for a run


def prepare(
    settings: SettingValues, corpus: Corpus | None = None, *, again: bool = False
) -> PreparedData:
    """Return the rows of a run's corpus; decode the clips that they need and the cache lacks.

    One process prepares, and others wait for it. A corpus without `files` is read at each call.

    corpus: by default the one that the settings choose.
    again: read all audio files again.
    """
    corpus = corpus or corpus_of(settings)
    tables = corpus.state()
    sources: Sources | None = None
    if tables is None:
        sources = read_sources(corpus)
        items = chain.from_iterable(sources.values())
        keys: object = [
            asdict(item) if isinstance(item, AudioTable) else _hash_rows(item) for item in items
        ]
    else:
        corpus.settings = DataSettings(settings)
        keys = {name: corpus.settings.get(name) for name in DATA_KEYS}
    folder = _CacheFolder.of(corpus, settings, tables, keys)
    if not again and (data := folder.read(is_checked=_is_first_of_node())):
        return data
    with _lock(folder.path), disk_errors(folder.path):
        if not again and (data := folder.read(is_checked=True)):  # another process was first
            return data
        folder.write(corpus, sources, again=again)
    data = folder.read(is_checked=False)
    if data is None:
        raise DataError(f"{folder.path} was removed while it was prepared. Start again.")
    return data


def _is_first_of_node() -> bool:
    """Return whether no other rank of this machine has looked at the files."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _hash_rows(manifest: Manifest) -> str:
    digest = hashlib.sha256()
    for block in manifest.blocks():
        content = pa.BufferOutputStream()
        table = block.rows.combine_chunks()
        with pa.ipc.new_stream(content, table.schema) as writer:
            writer.write_table(table)
        digest.update(content.getvalue())
    return digest.hexdigest()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait for the process that prepares a folder, and name it."""
    folder.parent.mkdir(parents=True, exist_ok=True)

    def tell(holder: str) -> None:
        logger.info(f"Waiting for {holder}, which prepares {folder}.")

    with task_lock(folder.parent, folder.name, wait=True, on_wait=tell):
        yield


@dataclass(frozen=True)
class _CacheFolder:
    """The folder of a corpus in the cache, and the rows of a run there."""

    path: Path
    keys: str  # a digest, in the names of the rows
    made_from: Mapping[str, object]
    work: Work

    @classmethod
    def of(
        cls, corpus: Corpus, settings: SettingValues, tables: object, keys: object
    ) -> "_CacheFolder":
        # The command may run in another folder the next time, and `cache prune` as well.
        source = {name: _with_absolute_paths(settings.get(name)) for name in SOURCE_KEYS}
        work = work_of(settings)
        made_from = {
            "source": source,
            "audio": {"sample_rate": work.sample_rate, "store": work.store, **audio_state()},
            "tables": tables,
            "modules": corpus.sources(),
            "code": code_state(),
        }
        name = f"{corpus.describe()['name']}-{digest_of(made_from)}"
        path = cache_folder() / CORPORA_FOLDER / UNUSUAL.sub("-", name).lstrip("-.")
        return cls(path, digest_of(keys), made_from, work)

    @property
    def record_file(self) -> Path:
        return self.path / f"rows-{self.keys}.json"

    def read(self, *, is_checked: bool) -> PreparedData | None:
        """Return the rows, None if there are none, or if an audio file is not as it was.

        is_checked: whether the files are looked at.
        """
        try:
            record = json.loads(self.record_file.read_text(**ENCODING))
            splits = {
                name: read_split(self.path, name, facts, f"-{self.keys}")
                for name, facts in record["splits"].items()
            }
            if is_checked:
                require_sizes(Storage(self.path), record["shards"])
                if not self._is_current():
                    return None
        except (OSError, ValueError, LookupError):  # it is not there, or damaged
            return None
        except DataError as error:
            logger.warning(f"{error} The clips are decoded again.")
            return None
        return PreparedData(record["roles"], splits)

    def _is_current(self) -> bool:
        before = _read_table(self.path / FILES_FILE)
        now = stat_files(before["path"])
        if now.equals(before):
            return True
        is_same = are_current(now, before["path"], sizes=before["size"], times=before["time"])
        num_changed = len(before) - (pc.sum(is_same).as_py() or 0)
        changed = plural(num_changed, "audio file")
        logger.info(f"{changed} of {len(before)} changed, came or went; rows are prepared again")
        return False

    def write(self, corpus: Corpus, sources: Sources | None, *, again: bool) -> None:
        """Decode what is missing, and write the rows."""
        is_stream = self.work.store == LAZY or corpus.has_audio
        for table in (*self.path.glob("*.parquet"), *self.path.glob("rows-*")) if again else ():
            table.unlink()  # not the audio, which a run may be reading
        self.path.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path)
        record = {"format": FORMAT, "made_from": self.made_from, "about": corpus.describe()}
        write_bytes_atomically(self.path / CORPUS_FILE, to_json(record).encode(**ENCODING))
        sources = sources or read_sources(corpus, as_stream=is_stream)
        storage = Storage(self.path)
        sizes = _shard_sizes(storage)
        for file, size in zip(sizes, storage.listed_sizes([*sizes]), strict=True):
            if size != sizes[file]:  # its clips are decoded again
                (self.path / file).with_suffix(".parquet").unlink()
        locator = Locator(self.work.sample_rate, f"{CORPORA_FOLDER}/{self.path.name}/")
        files = FILES.empty_table()
        clips = Clips.of([], files, locator)
        if not is_stream:
            files = _stat_clips(sources)
            clips = self._decode(sources, files, locator, take_over=not again)
        writer = RowWriter(
            self.path,
            storage,
            shards=list_shards(storage),
            work=self.work,
            locator=locator,
            clips=clips,
            ending=f"-{self.keys}",
        )
        splits = writer.write(corpus, sources)
        self._add_files(pa.concat_tables(writer.files))
        record = {"roles": corpus.roles(), "splits": splits, "shards": _shard_sizes(storage)}
        write_bytes_atomically(self.record_file, to_json(record).encode(**ENCODING))

    def _add_files(self, files: pa.Table) -> None:
        """Write the list of files, with those of rows for other keys, or remove such rows.

        They are removed if one of their files has changed.
        """
        with suppress(OSError, ValueError):
            before = _read_table(self.path / FILES_FILE)
            if not stat_files(before["path"]).equals(before):
                for record in self.path.glob("rows-*.json"):
                    record.unlink()
            else:
                is_other = pc.invert(pc.is_in(before["path"], value_set=files["path"]))
                files = pa.concat_tables([files, before.filter(is_other)])
        _write_table(self.path / FILES_FILE, files)

    def _decode(
        self, sources: Sources, files: pa.Table, locator: Locator, *, take_over: bool
    ) -> Clips:
        """Decode the clips that no shard has, once shards of other folders are taken over."""
        storage = Storage(self.path)

        def find_clips() -> Clips:
            shards = chain.from_iterable(list_shards(storage).values())
            return Clips.of(read_shard_tables(storage, shards), files, locator)

        clips = find_clips()
        missing = _find_missing(sources, clips)
        if take_over and self._take_over(missing, files):
            clips = find_clips()
            missing = _find_missing(sources, clips)
        if units := self._plan(missing):
            write_units(units, "decoding audio")
            clips = find_clips()
        return clips

    def _plan(self, missing: Sources) -> list[Unit]:
        """Return the units to write; those of tables may be there."""
        num_clips = sum(len(manifest) for manifest in manifests_of(missing))
        per_core = num_clips // (UNITS_PER_CORE * usable_cores())
        unit_clips = min(max(per_core, MIN_UNIT_CLIPS), UNIT_CLIPS)
        shards = list_shards(Storage(self.path))
        units = plan_units(missing, self.work, str(self.path), unit_clips)
        return [unit for unit in units if not shards.get(Work.of(unit).name)]

    def _take_over(self, missing: Sources, files: pa.Table) -> bool:
        """Link the shards of other folders that have any of the audio; return whether any has."""
        tables = {Work.of(unit).name for unit in self._plan(missing) if not unit["clips"]}
        paths = [FILES.empty_table()["path"]]
        paths += [
            manifest.rows[AUDIO].cast(pa.large_binary()) for manifest in manifests_of(missing)
        ]
        chunks = [*chain.from_iterable(column.chunks for column in paths)]
        wanted = files.filter(pc.is_in(files["path"], value_set=pa.chunked_array(chunks)))
        num_linked = 0
        for folder in self._folders_alike() if len(wanted) or tables else ():
            storage = Storage(folder)
            for unit, names in list_shards(storage).items():
                for shard in read_shard_tables(storage, names, ["audio"]):
                    clips = pa.Table.from_struct_array(shard.table[AUDIO])
                    is_wanted = are_current(
                        wanted, clips["path"], sizes=clips["file_size"], times=clips["file_time"]
                    )
                    if unit in tables or pc.any(is_wanted).as_py():
                        num_linked += 1
                        for suffix in (".arrow", ".parquet"):  # a shard is complete with its table
                            _link(folder / f"{shard.name}{suffix}", self.path)
        return num_linked > 0

    def _folders_alike(self) -> Iterator[Path]:
        """Yield the other folders of the cache whose audio is kept alike, the newest first."""
        files = self.path.parent.glob(f"*/{CORPUS_FILE}")
        for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            with suppress(OSError, ValueError, LookupError):
                audio = json.loads(file.read_text(**ENCODING))["made_from"]["audio"]
                if file.parent != self.path and audio == self.made_from["audio"]:
                    yield file.parent


def _with_absolute_paths(value: Any) -> Any:
    """Make the paths absolute that are in a value of a YAML."""
    if isinstance(value, Mapping):
        return {key: _with_absolute_paths(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_with_absolute_paths(inner) for inner in value]
    if isinstance(value, str | Path) and (path := Path(value).expanduser()).exists():
        return str(path.absolute())
    return value


def _shard_sizes(storage: Storage) -> dict[str, int]:
    """Return the sizes in bytes that the audio files of a corpus must have."""
    names = chain.from_iterable(list_shards(storage).values())
    tables = read_shard_tables(storage, names, [])
    return {f"{table.name}.arrow": table.facts.bytes for table in tables}


def _find_missing(sources: Sources, clips: Clips) -> Sources:
    """Return the clips to decode, and all tables with audio."""
    return {
        split: [
            clips.missing(item) if isinstance(item, Manifest) and not is_located(item) else item
            for item in items
        ]
        for split, items in sources.items()
    }


def _link(file: Path, folder: Path) -> None:
    """Link a file into a folder; copy it where a file system has no links."""
    target = folder / file.name
    if target.exists():
        return
    try:
        target.hardlink_to(file)
    except OSError:
        temporary = temporary_path(target)
        shutil.copyfile(file, temporary)
        temporary.replace(target)


def require_sizes(storage: Storage, sizes: Mapping[str, int]) -> None:
    """Raise DataError unless the files of a corpus have these sizes, in bytes."""
    actual = storage.listed_sizes([*sizes])
    for (name, expected), size in zip(sizes.items(), actual, strict=True):
        if size != expected:
            state = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise DataError(
                f"{storage.url_of(name)} {state}. `sbkit prepare --verify {storage.url}` lists all "
                "such files."
            )


def _read_table(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
