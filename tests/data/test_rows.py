"""Rows that Python holds become a table without loss."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import soundfile

from recipes.OwnData.corpus import OwnData
from sbkit.audio.io import encode_audio
from sbkit.data import read_manifests
from sbkit.data.audio_tables import AudioTable
from sbkit.data.read_manifests import store_rows

RATE = 16_000
CLIP = (1000 * np.sin(np.arange(800))).astype(np.int16)
WAV = encode_audio(CLIP, RATE, "WAV")


def stored(rows: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = pq.read_table(store_rows(rows)).to_pylist()
    return records


def test_rows_keep_columns_that_the_first_one_lacks_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the working folder, also in audio as `datasets` gives it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    of_datasets = {"path": "~/b.wav", "bytes": None}
    rows = [{"audio": "a.wav", "text": "x"}, {"audio": of_datasets, "text": "y", "speaker": "ann"}]
    assert stored(rows) == [
        {"audio": str(tmp_path / "a.wav"), "text": "x", "speaker": None},
        {"audio": "/home/ann/b.wav", "text": "y", "speaker": "ann"},
    ]


@pytest.mark.parametrize(
    "audio",
    [
        {"array": CLIP, "sampling_rate": RATE},
        {"array": CLIP / 32768, "sampling_rate": RATE, "path": "another.wav"},  # after a `map`
        {"bytes": WAV, "path": "clip.wav"},
        (CLIP, RATE),
        WAV,
        SimpleNamespace(get_all_samples=lambda: SimpleNamespace(data=CLIP, sample_rate=RATE)),
    ],
)
def test_audio_of_rows_may_be_in_memory(audio: Any) -> None:
    """The last one is like an AudioDecoder, which `datasets` gives where torchcodec is."""
    (row,) = stored([{"audio": audio, "text": "x"}])
    samples, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(samples, CLIP)


def test_stream_is_stored_in_files_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream was in memory five times; rows may differ in their columns."""
    monkeypatch.setattr(read_manifests, "FILE_BYTES", 2 * len(WAV))

    def stream() -> Iterator[dict[str, Any]]:
        for n in range(6):
            yield {"audio": {"bytes": WAV, "path": f"{n}.wav"}, "text": str(n), f"c{n}": n}

    folder = store_rows(stream())
    assert [pq.read_metadata(file).num_rows for file in sorted(folder.iterdir())] == [2, 2, 2]
    settings = {"manifest": {"train": str(folder)}, "language": "en"}
    tables = [t for t in OwnData(settings).read("train") if isinstance(t, AudioTable)]
    rows = [clip for table in tables for manifest, _ in table.batches() for clip in manifest]
    assert [clip.sentence for clip in rows] == [*"012345"]
    assert rows[5].columns["c5"] == "5"
    assert store_rows(stream()) == folder


DATASET = (
    datasets.Dataset.from_dict({"audio": ["/a.wav"], "text": ["x"], "label": ["dog"]})
    .cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))
    .cast_column("audio", datasets.Audio())
)
PLAIN = {"audio": "/a.wav", "text": "x", "label": "dog"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DATASET, "x"),
        (DATASET.to_iterable_dataset, "x"),
        (lambda: (dict(row) for row in [PLAIN]), "x"),
        (lambda: pd.DataFrame([PLAIN], index=[7], dtype="string[pyarrow]"), "x"),
        (
            lambda: DATASET.with_transform(lambda rows: {**rows, "text": ["y"], "label": ["dog"]}),
            "y",
        ),
    ],
)
def test_rows_may_be_of_any_kind(make: Callable[[], Any], text: str) -> None:
    assert stored(make()) == [{**PLAIN, "text": text}]
