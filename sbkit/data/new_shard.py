"""One shard that is being written, and where in its file each clip lies."""

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sbkit.audio.io import AudioError
from sbkit.base.files import naming
from sbkit.data.audio_store import SHARDED
from sbkit.data.clips import Clip, Clips
from sbkit.data.decode import Decoded
from sbkit.data.manifest import BadRow, Row
from sbkit.data.shard import AudioFile
from sbkit.data.sharded_corpus import FACTS, ShardFacts
from sbkit.data.storage import Storage
from sbkit.logs.log import say

UNREADABLE = "unreadable audio"


class NewShard:
    """One shard that is being written.

    Attributes:
        number: of the shards of its unit; sources: rows of the unit up to here.
    """

    def __init__(self, unit: str, number: int, audio: AudioFile, sources: int) -> None:
        self.number, self.audio, self.sources = number, audio, sources
        self._name = f"{unit}-{number:03d}"
        self._clips: list[Clip] = []
        self._samples: list[int] = []
        self._digests: list[str] = []
        self._left_out: list[tuple[str, str, str]] = []

    def add(self, row: Row | BadRow, decoded: Decoded | None) -> None:
        """Add a clip, or note why there is none."""
        self.sources += 1
        if isinstance(row, BadRow):
            self._left_out.append((row.id, row.reason, row.detail))
        elif decoded is None or isinstance(decoded.audio, AudioError):
            self._left_out.append((row.clip.id, UNREADABLE, str(decoded and decoded.audio)))
        else:
            with naming(self.audio.path.parent):
                self.audio.add(decoded.audio)
            self._clips.append(row.clip)
            self._samples.append(decoded.samples)
            self._digests.append(decoded.digest)

    def finish(self, storage: Storage, *, last: bool) -> None:
        """Put the audio in its place, then the table, which makes a shard of it."""
        with naming(self.audio.path.parent):
            sha256 = self.audio.finish()
        places = locate(self.audio.path)
        facts = ShardFacts(
            name=self._name,
            bytes=self.audio.path.stat().st_size,
            sha256=sha256,
            clips=len(self._clips),
            samples=sum(self._samples),
            sources=self.sources,
            last=last,
            left_out=self._left_out,
        )
        table = self._table(places).replace_schema_metadata({FACTS: json.dumps(asdict(facts))})
        content = io.BytesIO()
        pq.write_table(table, content)
        storage.take(self.audio.path, f"{self._name}.arrow")
        storage.write(f"{self._name}.parquet", content.getvalue())
        say(f"{self._name}: {facts.clips} clips, {facts.bytes / 1e6:.1f} MB")

    def _table(self, places: Mapping[str, Sequence[int]]) -> pa.Table:
        clips = Clips.of(self._clips)
        fields = {name: pa.array(values, pa.int64()) for name, values in places.items()}
        fields["digest"] = pa.array(self._digests, pa.string())
        columns = {
            "id": clips.own["id"],
            "sentence": clips.own["sentence"],
            "samples": pa.array(self._samples, pa.int64()),
            SHARDED: pa.StructArray.from_arrays(list(fields.values()), names=list(fields)),
        }
        others = {name: clips.columns[name] for name in clips.columns.column_names}
        return pa.table({**columns, **others})


def locate(file: Path) -> dict[str, list[int]]:
    """Return where the audio of each row of an Arrow file begins, its size and CRC-32, in bytes."""
    found: dict[str, list[int]] = {"start": [], "size": [], "crc32": []}
    with pa.memory_map(str(file)) as source:
        whole = source.read_buffer()
        for batch in pa.ipc.open_stream(whole):
            _, offsets, audio = batch["audio"].buffers()
            ends = np.frombuffer(offsets, np.int32)[: len(batch) + 1]
            starts = audio.address - whole.address + ends[:-1].astype(np.int64)
            found["start"] += starts.tolist()
            found["size"] += np.diff(ends).tolist()
            found["crc32"] += [zlib.crc32(each.as_buffer()) for each in batch["audio"]]
    return found
