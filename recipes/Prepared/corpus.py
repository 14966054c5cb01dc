"""A corpus that `sbkit prepare --out` has written, in a folder or at a URL."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import plain_name
from sbkit.data.cache import CORPUS_FILE, is_archive
from sbkit.data.corpus import Corpus, SettingValues
from sbkit.data.filesystem import Storage
from sbkit.data.manifest import BLOCK_ROWS, STORED_COLUMN, Excluded, Manifest
from sbkit.data.prepared import CORPUS_FORMAT, CorpusRecord
from sbkit.data.rows import STORED_SCHEMA, map_rows
from sbkit.data.shard import AUDIO
from sbkit.data.work_units import LAST_SHARD_SUFFIX

UNIT_ENDING = f"{LAST_SHARD_SUFFIX}.parquet"  # of the last shard of each unit


class PreparedCorpus(Corpus):
    """Rows with the place of their audio; the audio is read when it is used."""

    layout = "a folder or URL that `sbkit prepare --out` has written"
    has_audio = True

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        location = settings["data_folder"]
        if not isinstance(location, str | Path) or not str(location) or settings["manifest"]:
            return False
        if is_archive(Path(location)):
            return False
        storage = Storage(location)
        if storage.sizes([CORPUS_FILE]) != [None]:
            return True
        if not storage.url.startswith(("http://", "https://")) and storage.find("", UNIT_ENDING):
            raise DataError(
                f"{storage.url} is half written: it has shards, but no {CORPUS_FILE}. `sbkit "
                f"prepare YAML --out {storage.url} --finish` writes it, or lists what is missing."
            )
        return False

    def __init__(self, settings: SettingValues) -> None:
        super().__init__(settings)
        self._storage = Storage(str(settings["data_folder"]))
        self._content = self._storage.read(CORPUS_FILE)
        name = self._storage.url_of(CORPUS_FILE)
        try:
            version = json.loads(self._content)["format"]
            if version != CORPUS_FORMAT:
                raise DataError(
                    f"{name} has the format {version}, but this version of sbkit reads "
                    f"{CORPUS_FORMAT}. Use the version that wrote it, or prepare the corpus again."
                )
            self._record = CorpusRecord.parse(self._content)
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{name} is damaged ({str(error)[:100]}). {self._cure()}") from error
        for file in (*self._record.splits, *self._record.shards):
            plain_name(file, file=name)

    def _cure(self) -> str:
        return f"`sbkit prepare YAML --out {self._storage.url} --finish` writes it again."

    def splits(self) -> Mapping[str, Sequence[str]]:
        return self._record.roles

    def about(self) -> Mapping[str, str | None]:
        return self._record.about

    def state(self) -> object:
        """Return a digest of the index, which names all shards; those on a disk must be there."""
        if self._storage.folder is not None:
            self._record.require_shards(self._storage)
        return hashlib.sha256(self._content).hexdigest()

    def read(self, split: str) -> Iterator[Manifest]:
        rate = self._record.sample_rate
        if rate != self.settings["sample_rate"]:
            raise ConfigError(
                f"`sample_rate` is {self.settings['sample_rate']}, but the audio in "
                f"{self._storage.url} has {rate} Hz. Set `sample_rate: {rate}`.",
                keys=("sample_rate",),
            )
        if self.settings["columns"]:
            raise ConfigError(
                f"`columns` names columns of tables, but the rows of {self._storage.url} are "
                "prepared. Name them where it is prepared."
            )
        self._record.require_shards(self._storage)
        facts = self._record.splits[split]
        excluded = tuple(Excluded(**row) for row in facts["excluded"])
        with TemporaryDirectory() as scratch:
            name = f"{split}.arrow"
            try:
                file = self._storage.fetch(name, Path(scratch))
                if checksum(file) != facts["sha256"]:
                    raise ValueError(f"it is not the one of {CORPUS_FILE}")
                table = map_rows(file, facts["rows"]).table
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._storage.url_of(name)} is missing or damaged ({str(error)[:100]}). "
                    f"{self._cure()}"
                ) from error
            for start in range(0, max(1, len(table)), BLOCK_ROWS):
                yield self._locate(table.slice(start, BLOCK_ROWS), excluded)
                excluded = ()

    def _locate(self, rows: pa.Table, excluded: tuple[Excluded, ...]) -> Manifest:
        """Make the paths of shards in the rows absolute."""
        audio = pa.Table.from_struct_array(rows[AUDIO])
        for name in pc.unique(audio["file"]).to_pylist():
            plain_name(name, file=f"A table in {self._storage.url}")
        files = pc.binary_join_element_wise(self._storage.url, audio["file"], "/")
        audio = audio.set_column(audio.column_names.index("file"), "file", files)
        stored = rows.select(STORED_SCHEMA.names)
        stored = stored.set_column(stored.column_names.index(AUDIO), AUDIO, audio.to_struct_array())
        others = [name for name in rows.column_names if name not in STORED_SCHEMA.names]
        ids = rows["id"].cast(pa.binary())  # unique like a path
        rows = rows.select(others).append_column(AUDIO, ids)
        return Manifest(rows.append_column(STORED_COLUMN, stored.to_struct_array()), excluded)
