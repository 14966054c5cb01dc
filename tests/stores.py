"""Prepared splits from the rows of a test."""

import hashlib
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import InMemoryTable

from sbkit.audio.io import encode_audio
from sbkit.data.clip_decoding import STORE_FORMATS
from sbkit.data.corpus import corpus_of
from sbkit.data.manifest import Manifest
from sbkit.data.shard import AUDIO, AUDIO_TYPE

FOLDER = tempfile.TemporaryDirectory(prefix="sbkit-stores")  # deleted when Python ends


def read_split(settings: Mapping[str, object], split: str) -> Manifest:
    """Read a split of the corpus that settings choose, in English unless they say otherwise."""
    return Manifest.join(corpus_of({"language": "en", **settings}).blocks(split))


@dataclass(frozen=True)
class Utterance:
    """One row of a split; ``audio`` is little-endian int16, mono."""

    id: str
    text: str
    sentence: str
    speaker: str
    samples: int
    audio: bytes


def make_store(utterances: Iterable[Utterance], store: str = "pcm") -> datasets.Dataset:
    """Return a split of these rows, with their audio in one file."""
    rows = [asdict(utterance) for utterance in utterances]
    file, content = Path(FOLDER.name, uuid4().hex), b""
    for row in rows:
        samples = np.frombuffer(row[AUDIO], "<i2")
        clip = encode_audio(samples, 16_000, **STORE_FORMATS[store])
        row[AUDIO] = {"file": str(file), "start": len(content), "size": len(clip), "shard": 0}
        row[AUDIO] |= {"crc32": zlib.crc32(clip), "sample_rate": 16_000}
        row[AUDIO] |= {"digest": hashlib.sha256(clip).hexdigest()}
        content += clip
    file.write_bytes(content)
    texts = dict.fromkeys(("id", "text", "sentence", "speaker"), pa.string())
    schema = pa.schema({**texts, "samples": pa.int64(), AUDIO: AUDIO_TYPE})
    return datasets.Dataset(InMemoryTable(pa.Table.from_pylist(rows, schema)))
