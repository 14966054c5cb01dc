"""Splits: clips are decoded once, damage is noticed, and transcripts are measured."""

import io
import os
import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import av
import datasets
import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio
from torch.nn.functional import ctc_loss

from sbkit.audio import decode
from sbkit.audio.decode import Block
from sbkit.audio.io import read_audio
from sbkit.audio.lengths import Subsampling
from sbkit.base.content_cache import verifying
from sbkit.base.errors import SbkitError
from sbkit.data import cache
from sbkit.data import splits as splits_module
from sbkit.data.batch import UtteranceDataset
from sbkit.data.manifest import RESERVED_COLUMNS, Clip, Excluded, Manifest
from sbkit.data.sampler import Example
from sbkit.data.shard import read_rows
from sbkit.data.splits import (
    PreparedSplit,
    prepare_split,
    read_column,
    read_texts,
    read_transcripts,
    take_columns,
)
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer
from tests.processes import Process
from tests.shortage import largest_file
from tests.stores import Utterance, make_store


def make_clips(folder: Path, count: int, rate: int = 16_000) -> list[Clip]:
    """Write clips of 0.1, 0.2, 0.3, 0.1 ... seconds of noise."""
    folder.mkdir(exist_ok=True)
    clips = []
    for n in range(count):
        file = folder / f"clip{n}.flac"
        if not file.exists():
            noise = 0.1 * np.random.default_rng(n).standard_normal(rate * (n % 3 + 1) // 10)
            soundfile.write(file, noise, rate)
        clips.append(Clip(f"clip{n}", file, f"Clip {n}!", {"speaker": "ann", "age": str(n)}))
    return clips


def prepare_manifest(folder: Path, manifest: Manifest, **options: Any) -> PreparedSplit:
    """Prepare a training split of clips in a folder, with a cache there (`own_cache`)."""
    options = {"normalize": str.lower, "sample_rate": 16_000, "keep_empty": False, **options}
    roots = [path for path in folder.iterdir() if path.is_dir() and path.name != "cache"]
    return prepare_split(manifest, split="train", roots=roots, **options)


def prepare(folder: Path, clips: list[Clip], *excluded: Excluded, **options: Any) -> PreparedSplit:
    """Prepare clips like `prepare_manifest`."""
    return prepare_manifest(folder, Manifest.of([*clips, *excluded]), **options)


def assert_holds(prepared: PreparedSplit, clips: list[Clip], sample_rate: int = 16_000) -> None:
    rows = list(read_rows(prepared.dataset, range(len(prepared.dataset))))
    names = {*prepared.dataset.column_names} - {"speaker", "age", "duration_ms"}  # of the corpus
    assert names <= {*RESERVED_COLUMNS}
    assert len(rows) == len(clips)
    for row, clip in zip(rows, clips, strict=True):
        audio = read_audio(clip.path, sample_rate)
        assert (row["id"], row["sentence"], row["samples"]) == (clip.id, clip.sentence, len(audio))
        assert row["text"] == clip.sentence.lower()
        assert np.array_equal(row["audio"], audio)


@pytest.mark.parametrize("asks_again", ["another version", "verify"])
def test_verdict_on_a_file_is_kept_until_another_library_or_verify_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_again: str
) -> None:
    clips = make_clips(tmp_path / "clips", 21)

    def refuse(file: Any, *_: object) -> Iterator[Block]:
        if file.name == str(clips[1].path):
            raise av.InvalidDataError(1, "which this version does not read")
        yield from read_blocks(file, *_)

    read_blocks = decode.decode
    with monkeypatch.context() as earlier:
        earlier.setattr(decode, "decode", refuse)
        if asks_again == "another version":
            earlier.setattr(cache, "audio_identity", lambda: "av 17.0")
        assert prepare(tmp_path, clips).excluded[0].id == "clip1"
        earlier.setattr(decode, "decode", read_blocks)
        assert len(prepare(tmp_path, clips).excluded) == 1
    with verifying() if asks_again == "verify" else nullcontext():
        assert_holds(prepare(tmp_path, clips), clips)
    assert_holds(prepare(tmp_path, clips), clips)


def shards_of(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "audio").rglob("*.arrow"))


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_datasets_reads_shards_without_sbkit(tmp_path: Path, store: str) -> None:
    clips = make_clips(tmp_path / "clips", 3)
    prepare(tmp_path, clips, store=store)
    (file,) = shards_of(tmp_path)
    dataset = datasets.Dataset.from_file(str(file))
    assert dataset.features == datasets.Features({"audio": datasets.Audio()})
    for row, clip in zip(dataset.cast_column("audio", Audio(decode=False)), clips, strict=True):
        samples, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="int16")
        assert (row["audio"]["path"], rate) == (clip.path.name, 16_000)
        assert np.array_equal(samples, read_audio(clip.path))


def test_unchanged_audio_is_not_decoded_again(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 10)
    first = prepare(tmp_path, clips)
    assert sorted(decoded) == [clip.id for clip in clips]
    decoded.clear()
    corrected = [replace(clip, sentence=clip.sentence.replace("p 3", "p, 3")) for clip in clips]
    for changed in (clips, corrected, clips[::-1], clips[3:7]):
        again = prepare(tmp_path, changed)
        assert decoded == []
        assert_holds(again, changed)
        assert (again.fingerprint == first.fingerprint) == (changed is clips)


def test_fingerprint_depends_on_neither_the_folder_nor_a_time(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 4)
    copied = make_clips(tmp_path / "copy", 4)
    os.utime(copied[0].path, ns=(-5, -5))  # before 1970
    prepared = prepare(tmp_path, copied)
    assert prepare(tmp_path, clips).fingerprint == prepared.fingerprint
    assert_holds(prepared, copied)


def test_selected_and_pickled_split_reads_its_rows(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 120)[::-1]
    prepared = prepare(tmp_path, clips).dataset
    packed = pickle.dumps(prepared)
    assert len(packed) < 100_000  # the audio stays on the disk
    for dataset in (prepared, pickle.loads(packed)):
        chosen = dataset.select([5, 3, 77])
        assert take_columns(chosen, "id")["id"].to_pylist() == ["clip114", "clip116", "clip42"]
        (row,) = UtteranceDataset(chosen).__getitems__([Example((2, 0), 0)])
        parts = [read_audio(tmp_path / "clips" / f"clip{n}.flac") for n in (42, 114)]
        assert np.array_equal(row["audio"], np.concatenate(parts))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_unreadable_clip_is_excluded_with_its_reason(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 20)
    cut(clips[7].path)
    for _ in range(2):  # decoded, then from the cache
        prepared = prepare(tmp_path, clips)
        (item,) = prepared.excluded
        assert (item.split, item.id, item.reason) == ("train", "clip7", "unreadable audio")
        assert f"{clips[7].path} is truncated" in item.detail
        assert_holds(prepared, clips[:7] + clips[8:])
    with pytest.raises(SbkitError) as caught:
        prepare(tmp_path, clips[:8], Excluded("line 9", "no path", "empty"))
    for expected in ("rows of train are unusable", "2 of 9", "1 no path, 1 unrea", "truncated"):
        assert expected in str(caught.value)


def test_damaged_shard_is_prepared_again(
    tmp_path: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    first = prepare(tmp_path, clips)
    (file,) = shards_of(tmp_path)
    cut(file)
    os.utime(file, (0, 0))  # a younger one may belong to a process on another machine
    decoded.clear()
    again = prepare(tmp_path, clips)
    assert_holds(again, clips)
    assert len(decoded) == 40
    assert not file.exists()
    assert again.fingerprint == first.fingerprint
    (line,) = caplog.messages
    assert line.startswith(f"{file} is damaged (")


@pytest.mark.parametrize("limit", [{"BLOCK_CLIPS": 5}, {"BLOCK_BYTES": 30_000}])
def test_cache_shards_are_bounded_in_clips_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    (name,) = limit
    monkeypatch.setattr(cache, name, limit[name])
    clips = make_clips(tmp_path / "clips", 40)
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(shards_of(tmp_path)) > 5


def test_full_disk_is_refused_and_finished_shards_stay(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    monkeypatch.setattr(cache, "BLOCK_CLIPS", 5)
    soundfile.write(clips[30].path, np.zeros(50_000), 16_000)
    with largest_file(60_000), pytest.raises(SbkitError) as caught:
        prepare(tmp_path, clips)
    for words in ("is full", "sbkit cache prune", "same command resumes"):
        assert words in str(caught.value)
    finished = len(shards_of(tmp_path))
    assert finished > 3
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    decoded.clear()
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) < 20


PREPARE = """
import sys, time
from pathlib import Path
from sbkit.data import cache, clip_decoding
from tests.data.test_splits import make_clips, prepare

folder, count, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
cache.BLOCK_CLIPS = 5
read_audio, decoded = clip_decoding.read_audio, []
def slow(path, *arguments):
    time.sleep(delay)
    decoded.append(path)
    return read_audio(path, *arguments)
clip_decoding.read_audio = slow
prepared = prepare(folder, make_clips(folder / "clips", count))
print(len(decoded))
print(prepared.fingerprint)
"""


def start(folder: Path, count: int, delay: float) -> Process:
    return Process(["-c", PREPARE, folder, count, delay])


def test_killed_preparation_loses_one_block(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 60)
    process = start(tmp_path, 60, delay=0.2)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cache").rglob("*.parquet"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = len(shards_of(tmp_path))
    for leftover in (tmp_path / "cache").rglob(".*"):
        os.utime(leftover, (0, 0))  # younger ones may be of a process on another machine
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) == 60 - 5 * before
    assert [path.name for path in (tmp_path / "cache").rglob(".*")] == [".lock"]
    assert len(shards_of(tmp_path)) == before + 1


def test_three_processes_share_the_decoding(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 60)
    processes = [start(tmp_path, 60, delay=0.1) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    counts = [int(lines[-2]) for lines in outputs]
    assert sum(counts) == 60
    assert sorted(counts)[1] >= 5
    assert {lines[-1] for lines in outputs} == {prepare(tmp_path, clips).fingerprint}


# ---- stores


def test_flac_gives_the_samples_and_fingerprint_of_pcm(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 7)
    pcm, flac = prepare(tmp_path, clips), prepare(tmp_path, clips, store="flac")
    assert flac.fingerprint == pcm.fingerprint
    assert_holds(flac, clips)
    again = prepare(tmp_path, clips[::-1], store="flac")  # whose audio comes in another order
    assert_holds(again, clips[::-1])


def test_lazy_clips_are_decoded_when_they_are_read_and_named_if_they_are_gone(
    tmp_path: Path,
) -> None:
    clips = [
        replace(clip, columns={"duration_ms": str(100 * (n % 3 + 1))})
        for n, clip in enumerate(make_clips(tmp_path / "clips", 41))
    ]
    clips[0].path.unlink()  # before the run
    clips.append(
        replace(clips[1], id="none", path=tmp_path / "none.wav", columns={"duration_ms": "0"})
    )
    shutil.copy(clips[1].path, tmp_path / "none.wav")
    prepared = prepare(tmp_path, clips, store="lazy")
    assert [(row.id, row.detail) for row in prepared.excluded][1:] == [
        ("none", f"The corpus states 0 ms for {tmp_path}/none.wav.")
    ]
    clips.pop()
    assert prepared.dataset["samples"] == [1600 * (n % 3 + 1) for n in range(1, 41)]
    assert_holds(prepared, clips[1:])
    assert shards_of(tmp_path) == []
    clips[1].path.unlink()
    with pytest.raises(SbkitError, match="clip1"):
        UtteranceDataset(prepared.dataset).__getitems__([Example((0,), 16_000)])


TEXTS = ("hello", "a", "", "aab bb", "he! a")
FORTY_MS = Subsampling(stride=640, offset=240)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["hello ab"])


def store(texts: Sequence[str], samples: Sequence[int]) -> datasets.Dataset:
    rows = enumerate(zip(texts, samples, strict=True))
    return make_store(Utterance(str(n), text, "", "", count, b"") for n, (text, count) in rows)


def test_read_transcripts_counts_every_row(tokenizer: Tokenizer) -> None:
    transcripts = read_transcripts(store(TEXTS, range(5)), tokenizer)
    assert transcripts.samples.tolist() == [0, 1, 2, 3, 4]
    assert transcripts.characters.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.tokens.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.frames_needed.tolist() == [6, 1, 0, 8, 5]  # one more for each repeat
    assert transcripts.unknown.tolist() == [False, False, False, False, True]
    assert not transcripts.refused.any()


def test_too_short_rows_are_those_that_ctc_loss_cannot_align(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    texts = ["".join(random.choice([*"helo ab"], random.integers(1, 9))).strip() for _ in range(60)]
    texts = [" ".join(text.split()) or "a" for text in texts]
    samples = random.integers(400, 8000, len(texts)).tolist()
    transcripts = read_transcripts(store(texts, samples), tokenizer)
    frames = torch.from_numpy(transcripts.frames(FORTY_MS))
    tokens = [torch.tensor(tokenizer.encode(text)) for text in texts]
    losses = ctc_loss(
        torch.zeros(int(frames.max()), len(texts), tokenizer.vocab_size).log_softmax(-1),
        torch.cat(tokens),
        frames,
        torch.tensor([len(ids) for ids in tokens]),
        blank=tokenizer.vocabulary.blank,
        reduction="none",
    )
    impossible = np.flatnonzero(losses.isinf().numpy())
    assert 5 < len(impossible) < 55
    assert transcripts.too_short(FORTY_MS).tolist() == impossible.tolist()
    assert {*transcripts.too_short(FORTY_MS, percent=150).tolist()} > {*impossible.tolist()}


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 1, 1, 3], [2], []])
def test_columns_of_a_selection_are_taken_block_by_block(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, Arrow would copy the whole column, and refuse one of more than 2 GB."""
    monkeypatch.setattr(splits_module, "TEXT_ROWS", 2)
    selected = store(TEXTS, range(5)).select(rows)
    assert read_column(selected, "text") == [TEXTS[row] for row in rows]
    assert [*chain(*read_texts(selected))] == [TEXTS[row] for row in rows]
