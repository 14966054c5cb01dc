"""Rows become tensors, and nothing is lost or added on the way."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from sbkit.data.batch import LONGEST_JOINED, Batch, Collate, Rows, join_runs, make_loader
from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.data.store import Utterance, open_store, write_store
from sbkit.tensors.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.values.errors import SbkitError
from sbkit.values.labels import LabelSpace

TEXTS = ["one two", "three", "", "four five six", "seven"]
SAMPLES = [16_000, 8_000, 100, 32_000, 1]


def clip(row: int) -> np.ndarray:
    """Make the audio of a row, extremes included."""
    audio = np.random.default_rng(row).integers(-32_768, 32_768, SAMPLES[row]).astype("<i2")
    audio[0] = -32_768
    return audio


@pytest.fixture
def store(tmp_path: Path) -> datasets.Dataset:
    """Write five utterances."""
    rows = (
        Utterance(f"clip{n}", text, text, "ann", SAMPLES[n], clip(n).tobytes())
        for n, text in enumerate(TEXTS)
    )
    write_store(tmp_path / "store", rows)
    return open_store(tmp_path / "store")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Train characters on the texts."""
    file = tmp_path / "tokenizer.model"
    return ensure_tokenizer(model_file=file, kind="char", vocab_size=None, texts=lambda: TEXTS)


def collate(store: datasets.Dataset, tokenizer: Tokenizer, rows: list[int]) -> Batch:
    """Read rows and put them side by side."""
    return Collate(tokenizer)(Rows(store).__getitems__(rows))


def test_rows_side_by_side(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    batch = collate(store, tokenizer, [3, 1, 2])
    assert (batch.ids, batch.texts) == (["clip3", "clip1", "clip2"], [TEXTS[3], TEXTS[1], ""])
    assert len(batch) == 3
    assert batch.audio.shape == (3, 32_000)
    assert batch.audio.dtype == torch.int16
    assert batch.samples.tolist() == [32_000, 8_000, 100]
    for row, clip_row in zip(batch.audio, (3, 1, 2), strict=True):
        assert np.array_equal(row[: SAMPLES[clip_row]], clip(clip_row))
        assert not row[SAMPLES[clip_row] :].any()
    assert batch.token_counts.tolist() == [13, 5, 0]
    assert batch.tokens[1, :5].tolist() == tokenizer.encode("three")
    assert (batch.tokens[1, 5:] == tokenizer.labels.blank).all()
    assert batch.weights.tolist() == [1, 1, 1]
    assert batch.seconds == 40_100 / 16_000
    types = {batch.samples.dtype, batch.tokens.dtype, batch.token_counts.dtype, batch.weights.dtype}
    assert types == {torch.int64}


def test_a_placeholder_is_a_row_without_weight(
    store: datasets.Dataset, tokenizer: Tokenizer
) -> None:
    batch = collate(store, tokenizer, [~0])
    assert batch.weights.tolist() == [0]
    assert batch.ids == ["clip0"]
    assert np.array_equal(batch.audio[0], clip(0))
    assert batch.seconds == 0.0


def test_a_row_by_itself_is_the_row(store: datasets.Dataset) -> None:
    rows = Rows(store)
    assert len(rows) == 5
    assert rows[4] == {**store[4], "weight": 1}


def test_texts_without_a_label_make_a_batch(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    assert collate(store, tokenizer, [2]).tokens.shape == (1, 0)


def test_an_unseen_character_is_unk(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    row = {**Rows(store)[1], "text": "thrée"}
    assert tokenizer.labels.unk in Collate(tokenizer)([row]).tokens


def test_an_id_outside_the_labels_is_refused(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    tokenizer.labels = LabelSpace(size=6)
    with pytest.raises(SbkitError, match=r"from 0 to 5 .* but clip3 holds \d+"):
        collate(store, tokenizer, [3])


def test_a_batch_moves_as_a_whole(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    batch = collate(store, tokenizer, [0, 1])
    moved = batch.to(torch.device("meta"))
    tensors = {name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert {name for name in vars(moved) if getattr(moved, name) is not getattr(batch, name)} == (
        tensors
    )
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_follows_the_sampler(
    store: datasets.Dataset, tokenizer: Tokenizer, num_workers: int
) -> None:
    train = TrainSampler(samples=SAMPLES, batch_seconds=2.0, seed=0, world_size=2)
    for sampler in (train, EvalSampler(samples=SAMPLES, batch_seconds=2.0)):
        loader = make_loader(
            store,
            sampler=sampler,
            tokenizer=tokenizer,
            num_workers=num_workers,
            pin_memory=False,
        )
        batches = list(loader)
        assert len(batches) == len(loader) == len(sampler)
        for rows, batch in zip(sampler, batches, strict=True):
            assert batch.ids == [f"clip{row if row >= 0 else ~row}" for row in rows]
            assert batch.weights.tolist() == [int(row >= 0) for row in rows]
            for row, audio in zip(rows, batch.audio, strict=True):
                original = clip(row if row >= 0 else ~row)
                assert np.array_equal(audio[: len(original)], original)


def test_runs_are_joined_in_the_declared_share_of_batches() -> None:
    second = LONGEST_JOINED // 15
    batches = [
        [
            {"id": f"{n}-{k}", "text": f"t{k}", "audio": bytes([k]), "samples": second, "weight": 1}
            for k in range(5)
        ]
        for n in range(400)
    ]
    joined = [join_runs(batch, share=0.3) for batch in batches]
    assert 90 < sum(len(batch) < 5 for batch in joined) < 150
    assert {len(batch) for batch in joined} == {1, 2, 3, 5}  # runs of 5, of 4 and 3, of 2, of 1
    for batch in joined:
        assert " ".join(row["text"] for row in batch) == "t0 t1 t2 t3 t4"
        assert b"".join(row["audio"] for row in batch) == bytes(range(5))
        assert sum(row["samples"] for row in batch) == 5 * second
    assert joined == [join_runs(batch, share=0.3) for batch in batches]
    assert [join_runs(batch, share=0.0) for batch in batches] == batches


def test_what_would_be_too_long_is_not_joined() -> None:
    long = {"id": "a", "text": "a", "audio": b"", "samples": LONGEST_JOINED, "weight": 1}
    assert join_runs([long, long], share=1.0) == [long, long]
    assert join_runs([long], share=1.0) == [long]
    assert join_runs([{**long, "samples": 0}], share=1.0) == [{**long, "samples": 0}]
