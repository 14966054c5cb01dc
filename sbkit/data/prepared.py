"""Prepared splits in the cache: one process makes them, and every process of later runs maps them.

NAME-SETTINGS-VERSION/corpus.json     the corpus
NAME-SETTINGS-VERSION/splits.json     the roles of the splits, and what was left out of each
NAME-SETTINGS-VERSION/SPLIT.arrow     the rows of a split, as `datasets` maps them

SETTINGS is a hash of the values of `DATA_KEYS` in the YAML, VERSION one of the sizes and times of
the tables, and of the code. Audio files are looked at when the splits are made, and by `sbkit
prepare --verify`; not at each start.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import MemoryMappedTable, Table

from sbkit.base.errors import ConfigError
from sbkit.base.files import atomic_folder, fsync_tree, task_lock, to_json, write_text_atomically
from sbkit.base.versions import code_identity
from sbkit.config.hparams import Knobs
from sbkit.data.cache import PREPARED_FOLDER, default_cache, describe_folder, is_verifying
from sbkit.data.corpus import Corpus, KnobValues, list_files
from sbkit.data.manifest import Excluded
from sbkit.data.shard import AUDIO, LAZY
from sbkit.data.splits import Keep, PreparedSplit, keep_in_memory

RECORD_FILE = "splits.json"
MEASURED_FOLDER = "measured"  # of the prepared data: facts about splits
PATH_ENCODING: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names may be any bytes
# All that the corpora of this package, the filters and `prepare_split` read
DATA_KEYS = (
    *("corpus", "data_folder", "manifest", "splits", "split_shares", "language"),
    *("encoding", "path_column", "text_column", "where", "skip_quality_tags"),
    *("text", "keep_tags", "sample_rate", "audio_store"),
)

logger = logging.getLogger(__name__)


class DataKnobs(Knobs):
    """The values of `DATA_KEYS`.

    Raises ConfigError where code reads another key of the YAML, which would decide stored rows.
    """

    def __init__(self, knobs: KnobValues) -> None:
        super().__init__({name: knobs[name] for name in DATA_KEYS if name in knobs})
        self._other_names = {*knobs} - {*DATA_KEYS}

    def get(self, name: str, default: object = None) -> Any:
        if name in self._other_names:
            raise ConfigError(
                f"A corpus with a function `files` may read {', '.join(DATA_KEYS)}, but this one "
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


def prepare_once(
    corpus: Corpus, knobs: KnobValues, kind: str, make: Callable[[KnobValues, Keep], PreparedData]
) -> PreparedData:
    """Return the splits that an earlier call has stored, or make and store them.

    One process writes the rows, block by block; others meanwhile decode their share of the clips.
    A corpus without the function ``files(knobs)`` is made at each call, and kept in memory.

    kind: what ``make`` makes of these values.
    make: is given the values of `DATA_KEYS`, and what keeps the rows of a split; for a corpus
        without ``files``, all values.
    """
    files = list_files(corpus, knobs)
    if files is None:
        return make(knobs, keep_in_memory)
    knobs = DataKnobs(knobs)
    source = files[0]
    settings = _hash([kind, {**knobs}, [*map(str, files)]])
    module_file = Path(getattr(corpus, "__file__", None) or source)  # of a corpus of the user's own
    version = _hash([code_identity(), [*map(_describe_file, [*files, module_file])]])
    name = f"{source.name}-{settings}-{version}".lstrip("-.")
    folder = default_cache() / PREPARED_FOLDER / name
    if not is_verifying.get() and (data := _read(folder)) is not None:
        return data

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete or earlier one
        with atomic_folder(folder) as unfinished:
            _describe(unfinished, make(knobs, partial(_write_rows, unfinished)), source)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with task_lock(folder.parent, name, wait=False) as is_writer:
            if is_writer:
                write()
            elif knobs.get("audio_store") != LAZY:
                make(knobs, _leave_to_others)
        if not is_writer:
            with task_lock(folder.parent, name, wait=True):
                if _read(folder) is None:  # the other process has failed
                    write()
        stored = _read(folder)
    except OSError as error:  # a cache may be read-only, or full
        logger.info(f"note: All tables are read again at the next start, because {error}")
        stored = None
    return stored or make(knobs, keep_in_memory)


def measure_once(identity: object, measure: Callable[[], Any]) -> Any:
    """Return the plain data that an earlier call has stored for ``identity``, or measure it."""
    name = f"{_hash([identity, code_identity()])}.json"
    file = default_cache() / PREPARED_FOLDER / MEASURED_FOLDER / name
    if not file.is_file():
        facts = to_json(measure())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, facts)
        except OSError:  # a cache may be read-only
            return json.loads(facts)
    return json.loads(file.read_text(encoding="utf-8"))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]


def _describe_file(path: Path) -> list[Any]:
    """Return the size and the time of a file, or of all files in a folder, by name."""
    paths = [path]
    if path.is_dir():
        paths += sorted(inner for inner in path.iterdir() if not inner.is_dir())
    if not path.exists():  # which the corpus reports
        return [str(path)]
    statuses = [(str(inner), inner.stat()) for inner in paths]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


def _write_rows(folder: Path, split: str, blocks: Iterator[pa.Table]) -> Table:
    file = folder / f"{split}.arrow"
    first = next(blocks)
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, first.schema) as writer:
        for block in chain([first], blocks):
            writer.write_table(block.combine_chunks())  # also empty chunks would be written
    return MemoryMappedTable.from_file(str(file))


def _leave_to_others(split: str, blocks: Iterator[pa.Table]) -> None:
    next(blocks)  # before which the clips of a split are decoded


def _describe(folder: Path, data: PreparedData, source: Path) -> None:
    records = {
        name: {
            "excluded": [asdict(row) for row in split.excluded],
            "fingerprint": split.fingerprint,
            "filtered": split.filtered,
            "missing": split.missing,
            "shards": [*_list_shards(split.dataset)],
        }
        for name, split in data.splits.items()
    }
    describe_folder(folder, source)
    record = {"roles": data.roles, "splits": records}
    (folder / RECORD_FILE).write_text(to_json(record), **PATH_ENCODING)
    fsync_tree(folder)


def _list_shards(rows: datasets.Dataset) -> set[str]:
    """Return the shards that hold the audio of rows; none for clips that are files."""
    shards: set[str] = set()
    for audio in rows.data.table[AUDIO].chunks:
        files = audio.field("file").filter(audio.field("start").is_valid())
        shards.update(pc.unique(files).to_pylist())
    return shards


def _read(folder: Path) -> PreparedData | None:
    """Map the splits of a folder; None without all, or if audio has been removed or added."""
    file = folder / RECORD_FILE
    if not file.is_file():
        return None
    record = json.loads(file.read_text(**PATH_ENCODING))
    splits: dict[str, PreparedSplit] = {}
    for name, facts in record["splits"].items():
        table_file = folder / f"{name}.arrow"
        has_shards = all(map(os.path.exists, facts.pop("shards")))
        if not (table_file.is_file() and has_shards) or any(map(os.path.exists, facts["missing"])):
            return None
        excluded = [Excluded(**row) for row in facts.pop("excluded")]
        table = MemoryMappedTable.from_file(str(table_file))
        dataset = datasets.Dataset(table, fingerprint=facts["fingerprint"][:16])
        splits[name] = PreparedSplit(dataset, excluded, **facts)
    return PreparedData(record["roles"], splits)
