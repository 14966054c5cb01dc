"""Splits: clips are decoded once, damage is noticed, and transcripts are measured."""

import os
import pickle
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from torch.nn.functional import ctc_loss

from sbkit.audio.io import read_audio
from sbkit.audio.lengths import Subsampling
from sbkit.base.errors import SbkitError
from sbkit.base.files import TEMPORARY_NAMES
from sbkit.data import prepared
from sbkit.data import splits as splits_module
from sbkit.data.audio_tables import AudioTable
from sbkit.data.batch import UtteranceDataset
from sbkit.data.corpus import Corpus, CorpusRow, SettingValues
from sbkit.data.facts import fingerprint_of
from sbkit.data.manifest import RESERVED_COLUMNS, Clip, Excluded, Manifest
from sbkit.data.prepared import prepare as prepare_data
from sbkit.data.rows import PreparedSplit
from sbkit.data.sampler import Example
from sbkit.data.shard import read_rows
from sbkit.data.splits import (
    add_texts,
    count_tokens,
    read_column,
    read_texts,
)
from sbkit.data.tables import TableOptions
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer
from tests.runs import ROOT
from tests.shortage import largest_file
from tests.stores import Utterance, make_store

PAGE = ROOT / "docs/how-it-works/data.md"


def make_clips(folder: Path, count: int) -> list[Clip]:
    """Write clips of 0.1, 0.2, 0.3, 0.1 ... seconds of noise."""
    folder.mkdir(exist_ok=True)
    clips = []
    for n in range(count):
        file = folder / f"clip{n}.flac"
        if not file.exists():
            noise = 0.1 * np.random.default_rng(n).standard_normal(1600 * (n % 3 + 1))
            soundfile.write(file, noise, 16_000)
        clips.append(Clip(f"clip{n}", file, f"Clip {n}!", {"speaker": "ann", "age": str(n)}))
    return clips


class GivenRows(Corpus):
    """A corpus of one split, whose blocks of rows are given."""

    name = "given"

    def __init__(self, settings: SettingValues, *blocks: CorpusRow) -> None:
        super().__init__(settings)
        self._blocks = blocks

    def roles(self) -> dict[str, tuple[str, ...]]:
        return {"train": ("train",), "valid": (), "test": ()}

    def read(self, split: str) -> Sequence[CorpusRow]:
        return self._blocks


def prepare_manifest(manifest: Manifest, *, again: bool = False, **settings: Any) -> PreparedSplit:
    """Prepare a training split in the cache (`own_cache`); its texts are in lower case."""
    settings = {"sample_rate": 16_000, **settings}
    data = prepare_data(settings, GivenRows(settings, manifest), again=again)
    return add_texts(data.splits["train"], "train", str.lower, {}, keep_empty=False)


def prepare(clips: list[Clip], *excluded: Excluded, **options: Any) -> PreparedSplit:
    """Prepare clips like `prepare_manifest`."""
    return prepare_manifest(Manifest.of([*clips, *excluded]), **options)


def assert_holds(split: PreparedSplit, clips: list[Clip]) -> None:
    rows = list(read_rows(split.dataset, range(len(split.dataset))))
    names = {*split.dataset.column_names} - {"speaker", "age", "duration_ms"}  # of the corpus
    assert names <= {*RESERVED_COLUMNS}
    assert len(rows) == len(clips)
    for row, clip in zip(rows, clips, strict=True):
        audio = read_audio(clip.path, 16_000)
        assert (row["id"], row["sentence"], row["samples"]) == (clip.id, clip.sentence, len(audio))
        assert row["text"] == clip.sentence.lower()
        assert np.array_equal(row["audio"], audio)


@pytest.mark.parametrize("store", ["pcm", "lazy", "table"])
def test_blocks_of_a_split_may_have_different_columns(store: str, tmp_path: Path) -> None:
    """A column that a block lacks is null in its rows."""
    clips = [
        replace(clip, columns={"duration_ms": f"{100 * n}"})
        for n, clip in enumerate(make_clips(tmp_path, 3), start=1)
    ]
    ages = [replace(clips[1], columns={"duration_ms": "200", "age": "40"}), clips[2]]
    blocks: list[CorpusRow] = [Manifest.of([]), Manifest.of(clips[:1]), Manifest.of(ages)]
    if store == "table":
        row = {"audio": clips[1].path.read_bytes(), "text": clips[1].sentence, "age": "40"}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        blocks[2:] = [AudioTable(str(tmp_path / "a.parquet"), "", TableOptions(), {})]
        blocks += [Manifest.of(clips[2:])]
    settings = {"sample_rate": 16_000, "audio_store": store.replace("table", "pcm")}
    dataset = prepare_data(settings, GivenRows(settings, *blocks)).splits["train"].dataset
    rows = [*read_rows(dataset, range(3))]
    assert [row["age"] for row in rows] == [None, "40", None]
    assert [row["sentence"] for row in rows] == [clip.sentence for clip in clips]
    assert not [*(tmp_path / "cache").rglob(TEMPORARY_NAMES)]


def test_missing_value_is_another_one_than_an_empty_text(tmp_path: Path) -> None:
    """What is measured on rows is kept for rows of the same fingerprint."""
    clips = make_clips(tmp_path, 2)
    missing, empty = (
        prepare([clips[0], replace(clips[1], columns={"speaker": "ann", **columns})])
        for columns in ({}, {"age": ""})
    )
    assert [[*split.dataset["age"]] for split in (missing, empty)] == [["0", None], ["0", ""]]
    assert fingerprint_of(missing.dataset) != fingerprint_of(empty.dataset)


def shards_of(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*-last.clips"))


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_shards_are_read_without_sbkit_as_the_page_says(tmp_path: Path, store: str) -> None:
    clips = make_clips(tmp_path / "clips", 3)
    prepare(clips, audio_store=store)
    (file,) = shards_of(tmp_path)
    (code,) = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text("utf-8"))
    names: dict[str, Any] = {}
    exec(code, names)
    rows = [*names["read_shard"](file.with_suffix(""))]
    assert [row[::2] for row in rows] == [(os.fsencode(clip.path), 16_000) for clip in clips]
    for (_, samples, _), clip in zip(rows, clips, strict=True):
        assert np.array_equal(samples, read_audio(clip.path))


def test_corpus_grows_by_the_clips_that_are_new(tmp_path: Path, opened: list[str]) -> None:
    """Each file is opened once: it is hashed while it is decoded."""
    clips = make_clips(tmp_path / "clips", 20)
    first = prepare(clips[:10])
    assert sorted(opened) == sorted(str(clip.path) for clip in clips[:10])
    opened.clear()
    corrected = [replace(clip, sentence=clip.sentence.replace("p 3", "p, 3")) for clip in clips]
    for changed in (clips[:10], corrected[:10], clips[9::-1], clips[3:7]):
        again = prepare(changed)
        assert opened == []
        assert_holds(again, changed)
        assert (again.digest == first.digest) == (changed == clips[:10])
    inodes = {file: file.stat().st_ino for file in shards_of(tmp_path)}
    assert_holds(prepare(clips), clips)
    assert sorted(opened) == sorted(str(clip.path) for clip in clips[10:])
    assert {file: file.stat().st_ino for file in inodes} == inodes
    assert len(shards_of(tmp_path)) == len(inodes) + 1


@pytest.mark.parametrize("can_link", [True, False])
def test_shards_are_taken_over_at_a_new_address(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    clips = make_clips(tmp_path / "clips", 10)
    prepare(clips)
    before = shards_of(tmp_path)
    opened.clear()
    if not can_link:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=PermissionError(1, "no links")))
    assert_holds(prepare(clips, columns={"text": "sentence"}), clips)
    assert opened == []
    assert not {*before} & {*(after := [*{*shards_of(tmp_path)} - {*before}])}
    assert [file.name for file in after] == [file.name for file in before]
    assert after[0].samefile(before[0]) == can_link
    prepare(clips, columns={"text": "other"}, audio_store="flac")
    assert len(opened) == 10


def test_digest_depends_on_neither_folder_nor_time_nor_store_of_audio(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 7)
    copied = make_clips(tmp_path / "copy", 7)
    os.utime(copied[0].path, ns=(-5, -5))  # before 1970
    digest = prepare(clips).digest
    for same, store in ((copied, "pcm"), (clips, "flac")):
        prepared = prepare(same, audio_store=store)
        assert prepared.digest == digest
        assert_holds(prepared, same)
    again = prepare(clips[::-1], audio_store="flac")  # whose audio comes in another order
    assert_holds(again, clips[::-1])


def test_selected_and_pickled_split_reads_its_rows(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 120)[::-1]
    prepared = prepare(clips).dataset
    packed = pickle.dumps(prepared)
    assert len(packed) < 100_000  # the audio stays on the disk
    for dataset in (prepared, pickle.loads(packed)):
        chosen = dataset.select([5, 3, 77])
        (row,) = UtteranceDataset(chosen).__getitems__([Example((2, 0), 0)])
        parts = [read_audio(tmp_path / "clips" / f"clip{n}.flac") for n in (42, 114)]
        assert np.array_equal(row["audio"], np.concatenate(parts))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_unreadable_clip_is_excluded_with_its_reason(tmp_path: Path, opened: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 20)
    cut(clips[7].path)
    for decoded in (20, 0):  # the verdict is kept
        prepared = prepare(clips)
        assert len(opened) == decoded
        opened.clear()
        (item,) = prepared.excluded
        assert (item.split, item.id, item.reason) == ("train", "clip7", "unreadable audio")
        assert f"{clips[7].path} is truncated" in item.detail
        assert_holds(prepared, clips[:7] + clips[8:])
    with pytest.raises(SbkitError) as caught:
        prepare(clips[:8], Excluded("line 9", "no path", "empty"))
    for expected in ("rows of train are unusable", "2 of 9", "1 no path, 1 unrea", "truncated"):
        assert expected in str(caught.value)


def test_full_disk_is_refused_and_finished_shards_stay(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    for name in ("UNIT_CLIPS", "MIN_UNIT_CLIPS"):
        monkeypatch.setattr(prepared, name, 5)
    soundfile.write(clips[30].path, np.zeros(50_000), 16_000)
    with largest_file(60_000), pytest.raises(SbkitError) as caught:
        prepare(clips)
    for words in ("is full", "sbkit cache prune", "Then rerun the same"):
        assert words in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    tables = (pq.read_table(file.with_suffix(".parquet")) for file in shards_of(tmp_path))
    finished = sum(map(len, tables))
    opened.clear()
    assert_holds(prepare(clips), clips)
    assert len(opened) == 40 - finished


# ---- stores


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
    prepared = prepare(clips, audio_store="lazy")
    assert [(row.id, row.detail) for row in prepared.excluded][1:] == [
        ("none", f"The corpus states 0 ms for {tmp_path}/none.wav.")
    ]
    clips.pop()
    assert prepared.dataset["samples"] == [1600 * (n % 3 + 1) for n in range(1, 41)]
    assert_holds(prepared, clips[1:])
    assert shards_of(tmp_path) == []
    clips[1].path.unlink()
    clips[2].path.write_bytes(b"")
    assert not prepare(clips[2:], audio_store="lazy").excluded  # it is there
    for row, name in enumerate(("clip1", "clip2")):
        with pytest.raises(SbkitError, match=name):
            UtteranceDataset(prepared.dataset).__getitems__([Example((row,), 16_000)])


TEXTS = ("hello", "a", "", "aab bb", "he! a")
FORTY_MS = Subsampling(stride=640, offset=240)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["hello ab"])


def store(texts: Sequence[str], samples: Sequence[int]) -> datasets.Dataset:
    rows = enumerate(zip(texts, samples, strict=True))
    return make_store(Utterance(str(n), text, "", "", count, b"") for n, (text, count) in rows)


def test_tokens_of_every_row_are_counted(tokenizer: Tokenizer) -> None:
    transcripts = count_tokens(store(TEXTS, range(5)), tokenizer)
    assert transcripts.samples.tolist() == [0, 1, 2, 3, 4]
    assert transcripts.characters.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.tokens.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.frames_needed.tolist() == [6, 1, 0, 8, 5]  # one more for each repeat
    assert transcripts.has_unknown.tolist() == [False, False, False, False, True]
    assert not transcripts.has_refused_id.any()


def test_tokens_are_counted_for_each_tokenizer(tmp_path: Path) -> None:
    """Two of one size differ in their tokens, and the counts are kept beside the rows."""
    rows = prepare(make_clips(tmp_path / "clips", 1)).dataset
    assert read_column(rows, "text") == ["clip 0!"]
    for text, is_unknown in (("clip 0!", False), ("clap 0!", True), ("clip 0!", False)):
        tokenizer = char_tokenizer(tmp_path / text[:4], [text])
        assert tokenizer.vocab_size == 11
        assert count_tokens(rows, tokenizer).has_unknown.tolist() == [is_unknown]


def test_too_short_rows_are_those_that_ctc_loss_cannot_align(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    texts = ["".join(random.choice([*"helo ab"], random.integers(1, 9))).strip() for _ in range(60)]
    texts = [" ".join(text.split()) or "a" for text in texts]
    samples = random.integers(400, 8000, len(texts)).tolist()
    transcripts = count_tokens(store(texts, samples), tokenizer)
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
