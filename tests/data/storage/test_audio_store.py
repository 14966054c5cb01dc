"""What is kept of audio differs, what is read does not."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from sbkit.base.errors import SbkitError
from sbkit.data.batches.batch import UtteranceDataset
from sbkit.data.batches.plan import Example
from sbkit.data.corpora.clips import Clip
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.storage.audio_store import COLUMNS, read_stored, require_store, to_stored
from sbkit.data.storage.prepare import PreparedSplit, prepare_split
from tests.data.storage.test_prepare import make_clips, shards_of


def prepare(folder: Path, clips: list[Clip], store: str) -> PreparedSplit:
    return prepare_split(
        Manifest(clips, ()),
        split="train",
        normalize=str.lower,
        sample_rate=16_000,
        cache_folder=folder / "cache",
        keep_empty=False,
        store=store,
    )


def speech_like(folder: Path) -> list[Clip]:
    """Write a second of a tone, 48 kHz in stereo."""
    time = np.arange(48_000) / 48_000
    tone = 0.3 * np.sin(2 * np.pi * 220 * time)
    soundfile.write(folder / "tone.wav", np.stack([tone, tone], 1), 48_000)
    return [Clip("tone", folder / "tone.wav", "A tone")]


@pytest.mark.parametrize("store", ["flac", "none"])
def test_every_store_gives_the_samples_and_the_fingerprint_of_pcm(
    tmp_path: Path, store: str
) -> None:
    clips = make_clips(tmp_path / "clips", 7) + speech_like(tmp_path)
    plain, other = prepare(tmp_path, clips, "pcm"), prepare(tmp_path, clips, store)
    assert other.fingerprint == plain.fingerprint
    assert COLUMNS[store] in other.dataset.column_names
    assert "audio" not in other.dataset.column_names
    assert other.dataset["samples"][:] == plain.dataset["samples"][:]
    for one, another in zip(plain.dataset, other.dataset, strict=True):
        assert read_stored(another) == one["audio"]
    joined = [Example((2, 7), 1)]
    (want,), (got,) = (
        UtteranceDataset(each.dataset).__getitems__(joined) for each in (plain, other)
    )
    assert got == want


def test_flac_takes_less_room_and_none_takes_none(tmp_path: Path) -> None:
    clips = speech_like(tmp_path)
    sizes = []
    for store in COLUMNS:
        before = set(shards_of(tmp_path))
        prepare(tmp_path, clips, store)
        (shard,) = set(shards_of(tmp_path)) - before
        sizes.append(shard.stat().st_size)
    pcm, flac, none = sizes
    assert flac < 0.6 * pcm
    assert none < 1000


@pytest.mark.parametrize("change", ["another length", "gone"])
def test_a_clip_that_changes_after_preparation_is_named(tmp_path: Path, change: str) -> None:
    clips = speech_like(tmp_path)
    dataset = prepare(tmp_path, clips, "none").dataset
    if change == "gone":
        clips[0].path.unlink()
    else:
        soundfile.write(clips[0].path, np.zeros(999), 16_000)
    with pytest.raises(SbkitError, match=r"tone\.wav"):
        UtteranceDataset(dataset).__getitems__([Example((0,), 16_000)])


def test_workers_decode(tmp_path: Path) -> None:
    dataset = prepare(tmp_path, make_clips(tmp_path / "clips", 4), "flac").dataset
    loader = torch.utils.data.DataLoader(
        UtteranceDataset(dataset),
        batch_sampler=[[Example((row,), 1)] for row in range(4)],  # type: ignore[arg-type]
        collate_fn=lambda rows: [len(row["audio"]) // 2 for row in rows],
        num_workers=1,
    )
    assert [length for lengths in loader for length in lengths] == dataset["samples"][:]


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(SbkitError, match="`audio_store` must be one of pcm, flac, none, but is 'm"):
        require_store("mp3")


@pytest.mark.parametrize(
    ("store", "stored"),
    [("pcm", bytes(101)), ("pcm", bytes(100)), ("flac", b""), ("flac", b"fLaC no audio")]
    + [("flac", to_stored(bytes(2 * n), Path(), store="flac", sample_rate=8000)) for n in (7, 99)],
)
def test_audio_that_is_made_up_is_refused_in_a_sentence(store: str, stored: bytes) -> None:
    with pytest.raises(SbkitError, match="must be as long as when it was prepared .51 samples.,"):
        read_stored({"id": "clip", "samples": 51, COLUMNS[store]: stored})
