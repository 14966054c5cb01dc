"""Prepared splits in the cache: one process makes them, and every process of later runs maps them.

NAME-SETTINGS-.../corpus.json    the corpus
NAME-SETTINGS-.../splits.json    the roles of the splits, and what was left out of each
NAME-SETTINGS-.../files.arrow    the audio files as they were
NAME-SETTINGS-.../SPLIT.arrow    the rows of a split, as `datasets` maps them

They are made from the values of `DATA_KEYS`, the tables, the code of the corpus, and the audio
files. The paths of shards are relative to the cache, which can be moved.
"""

import hashlib
import json
import logging
import os
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

from sbkit.base.content_cache import file_digests, find_kept, is_verifying, keep
from sbkit.base.errors import ConfigError
from sbkit.base.files import to_json
from sbkit.base.messages import plural
from sbkit.config.hparams import Settings
from sbkit.data.cache import PREPARED_FOLDER, describe_folder, is_extracted
from sbkit.data.corpus import Corpus, SettingValues
from sbkit.data.manifest import Excluded
from sbkit.data.shard import AUDIO, LAZY
from sbkit.data.splits import Keep, PreparedSplit, keep_in_memory

RECORD_FILE, FILES_FILE = "splits.json", "files.arrow"
FACTS_FOLDER = "facts"  # of the cache: about splits
PATH_ENCODING: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names may be any bytes
# All that the corpora of this package, the filters and `prepare_split` read
DATA_KEYS = (
    *("corpus", "data_folder", "manifest", "splits", "split_shares", "language"),
    *("columns", "encoding", "where", "skip_quality_tags"),
    *("text", "keep_tags", "sample_rate", "audio_store"),
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


def prepare_once(
    corpus: Corpus,
    kind: str,
    make: Callable[[Corpus, Keep], PreparedData],
) -> PreparedData:
    """Return the splits that an earlier call has stored, or make and store them.

    One process writes the rows, block by block; others meanwhile decode their share of the clips.
    A corpus whose ``files`` are None is made at each call, and kept in memory.

    make: is given the corpus with the values of `DATA_KEYS` only, and what keeps the rows of a
        split; a corpus without ``files`` has all values.
    """
    files = corpus.files()
    if files is None:
        return make(corpus, keep_in_memory)
    tables = [path.absolute() for path in files]
    settings = DataSettings(corpus.settings)
    corpus = type(corpus)(settings)
    is_lazy = settings.get("audio_store") == LAZY
    values = [kind, {**settings}, tables]
    made_from: dict[str, object] = {"values": values, "corpus": corpus.sources()}
    made_from["tables"] = [*_digests_of(tables)]

    def write(folder: Path) -> None:
        folder.mkdir()
        data = make(corpus, partial(_write_rows, folder))
        _describe(folder, data, tables[0], is_lazy)
        if is_lazy:  # whose files came in blocks: note all together, for the next start
            _is_current(folder, read=False)

    def decode_first_block(split: str, blocks: Iterator[pa.Table]) -> None:
        next(blocks)  # before which the clips of a split are decoded

    def decode_share() -> None:
        if not is_lazy:
            make(corpus, decode_first_block)

    def is_current(folder: Path) -> bool:
        return _is_current(folder, read=not is_lazy) and not is_verifying.get()

    label = hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:12]
    folder = keep(
        PREPARED_FOLDER,
        made_from,
        write,
        label=f"{tables[0].name}-{label}",
        is_current=is_current,
        meanwhile=decode_share,
    )
    return _read(folder)


def measure_once(identity: Mapping[str, object], measure: Callable[[], Any]) -> Any:
    """Return the plain data that an earlier call has kept for ``identity``, or measure it."""

    def write(file: Path) -> None:
        file.write_text(to_json(measure()), encoding="utf-8")

    def read(file: Path) -> Any:
        return json.loads(file.read_text(encoding="utf-8"))

    return read(keep(FACTS_FOLDER, identity, write, is_current=lambda file: bool(read(file))))


def _digests_of(tables: Sequence[Path]) -> Iterator[list[tuple[str, str]]]:
    """Yield the name and the digest of each table, or of all files in a folder."""
    for path in tables:
        folder, names = path.parent, [path.name]
        if path.is_dir():
            folder = path
            names = sorted(inner.name for inner in path.iterdir() if not inner.is_dir())
        digests = file_digests(folder, names).digests.to_pylist()
        yield [*zip(names, digests, strict=True)]


def _write_rows(folder: Path, split: str, blocks: Iterator[pa.Table]) -> Table:
    file = folder / f"{split}.arrow"
    first = next(blocks)
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, first.schema) as writer:
        for block in chain([first], blocks):
            writer.write_table(block.combine_chunks())  # also empty chunks would be written
    return MemoryMappedTable.from_file(str(file))


def _describe(folder: Path, data: PreparedData, source: Path, is_lazy: bool) -> None:
    records = {
        name: {
            "excluded": [asdict(row) for row in split.excluded],
            "fingerprint": split.fingerprint,
            "dataset": split.dataset._fingerprint,
            "filtered": split.filtered,
            "shards": [*_list_shards(split.dataset)],
        }
        for name, split in data.splits.items()
    }
    describe_folder(folder, source)
    record = {"roles": data.roles, "splits": records}
    (folder / RECORD_FILE).write_text(to_json(record), **PATH_ENCODING)
    files = pa.concat_tables([split.files for split in data.splits.values()])
    if not is_lazy:  # the audio that was in a table or an archive is decoded, and changes with it
        roots = pc.unique(files["root"]).to_pylist()
        extracted_roots = [root for root in roots if is_extracted(os.fsdecode(root))]
        is_inside = pc.is_in(files["root"], value_set=pa.array(extracted_roots, pa.binary()))
        files = files.filter(pc.invert(is_inside))
    file = str(folder / FILES_FILE)
    with pa.OSFile(file, "wb") as stream, pa.ipc.new_stream(stream, files.schema) as writer:
        writer.write_table(files)


def _is_current(folder: Path, *, read: bool) -> bool:
    """Return whether all rows, their shards and their audio files are as they were prepared.

    read: whether files are read if their times are new; else only their sizes are compared.
    """
    _read(folder)
    splits = json.loads((folder / RECORD_FILE).read_text(**PATH_ENCODING))["splits"]
    files = MemoryMappedTable.from_file(str(folder / FILES_FILE)).table
    shards = chain(*(split["shards"] for split in splits.values()))
    if not all("://" in shard or find_kept(shard) for shard in shards):
        return False
    num_changed = 0
    roots = pc.unique(files["root"]).to_pylist()
    for root in roots:
        of_root = files.filter(pc.equal(files["root"], root)) if len(roots) > 1 else files
        before = of_root["digest"].combine_chunks()
        names = of_root["name"].combine_chunks()
        now = file_digests(Path(os.fsdecode(root)), names, read=read).digests
        if not now.equals(before):
            pairs = zip(now.to_pylist(), before.to_pylist(), strict=True)
            num_changed += sum(new != old for new, old in pairs)
    if num_changed or is_verifying.get():
        changed = plural(num_changed, "audio file")
        logger.info(f"{changed} of {len(files)} changed, came or went; rows are prepared again")
    return not num_changed


def _list_shards(rows: datasets.Dataset) -> set[str]:
    shards: set[str] = set()
    for audio in rows.data.table[AUDIO].chunks:
        files = audio.field("file").filter(audio.field("start").is_valid())
        shards.update(pc.unique(files).to_pylist())
    return shards


def _read(folder: Path) -> PreparedData:
    record = json.loads((folder / RECORD_FILE).read_text(**PATH_ENCODING))
    splits: dict[str, PreparedSplit] = {}
    for name, facts in record["splits"].items():
        excluded = [Excluded(**row) for row in facts["excluded"]]
        table = MemoryMappedTable.from_file(str(folder / f"{name}.arrow"))
        dataset = datasets.Dataset(table, fingerprint=facts["dataset"])
        splits[name] = PreparedSplit(dataset, excluded, facts["fingerprint"], facts["filtered"])
    return PreparedData(record["roles"], splits)
