"""Rows become batches of tensors, and loaders yield them."""

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from sbkit.audio.augment import SpeedGroup
from sbkit.base.errors import SbkitError
from sbkit.data import batch as batch_module
from sbkit.data.batch import TextBatch, TextCollate, UtteranceDataset, make_loader, make_loaders
from sbkit.data.sampler import EvalSampler, Example, RankSampler, TrainSampler
from sbkit.data.splits import Splits
from sbkit.distributed.device import resolve_placement
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.vocabulary import Vocabulary
from tests import processes
from tests.decoding.spoken import char_tokenizer
from tests.shortage import TORCH_REFUSALS, refusing
from tests.stores import Utterance, make_store

TEXTS = ["one two", "three", "", "four five six", "seven"]
SAMPLES = [16_000, 8_000, 100, 32_000, 1]


def clip(row: int) -> np.ndarray:
    audio = np.random.default_rng(row).integers(-32_768, 32_768, SAMPLES[row]).astype("<i2")
    audio[0] = -32_768
    return audio


@pytest.fixture
def store() -> datasets.Dataset:
    rows = (
        Utterance(f"clip{n}", text, text, "ann", SAMPLES[n], clip(n).tobytes())
        for n, text in enumerate(TEXTS)
    )
    return make_store(rows)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path, TEXTS)


def collate(store: datasets.Dataset, tokenizer: Tokenizer, rows: list[int]) -> TextBatch:
    examples = [Example((row,), SAMPLES[row]) for row in rows]
    return TextCollate(tokenizer)(UtteranceDataset(store).__getitems__(examples))


def test_text_collate_pads_audio_and_tokens(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    batch = collate(store, tokenizer, [3, 1, 2])
    assert (batch.ids, batch.texts) == (["clip3", "clip1", "clip2"], [TEXTS[3], TEXTS[1], ""])
    assert len(batch) == 3
    assert batch.audio.shape == (3, 32_000)
    assert batch.audio.dtype == torch.int16
    assert batch.audio_lengths.tolist() == [32_000, 8_000, 100]
    for row, clip_row in zip(batch.audio, (3, 1, 2), strict=True):
        assert np.array_equal(row[: SAMPLES[clip_row]], clip(clip_row))
        assert not row[SAMPLES[clip_row] :].any()
    assert batch.token_lengths.tolist() == [13, 5, 0]
    assert batch.tokens[1, :5].tolist() == tokenizer.encode("three")
    assert (batch.tokens[1, 5:] == tokenizer.vocabulary.blank).all()
    assert batch.weights.tolist() == [1, 1, 1]
    assert batch.seconds == 40_100 / 16_000
    integers = (batch.audio_lengths, batch.tokens, batch.token_lengths, batch.weights)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert UtteranceDataset(store)[3]["id"] == "clip3"  # as `sbkit check` reads rows


def test_joined_rows_of_a_language_without_spaces_have_no_token_between(tmp_path: Path) -> None:
    texts = ["今天", "回家了"]
    tokenizer = char_tokenizer(tmp_path, texts)
    rows = (Utterance(f"clip{n}", text, text, "ann", 4, b"\0" * 8) for n, text in enumerate(texts))
    joined = UtteranceDataset(make_store(rows)).__getitems__([Example((0, 1), 8)])
    batch = TextCollate(tokenizer)(joined)
    assert batch.tokens.tolist() == [tokenizer.encode("今天回家了")]
    assert tokenizer.vocabulary.unk not in batch.tokens


def test_text_collate_refuses_an_id_outside_the_vocabulary(
    store: datasets.Dataset, tokenizer: Tokenizer
) -> None:
    tokenizer.vocabulary = Vocabulary(size=6)
    with pytest.raises(SbkitError, match=r"from 0 to 5 .* but clip3 holds \d+"):
        collate(store, tokenizer, [3])


def test_batch_to_moves_all_but_lengths(store: datasets.Dataset, tokenizer: Tokenizer) -> None:
    batch = collate(store, tokenizer, [0, 1])
    side = torch.zeros(2)
    batch = replace(batch, sides={"voice": side, "voice_lengths": side})
    fields = dict(vars(batch.to(torch.device("meta"))))
    sides = fields.pop("sides")
    assert (sides["voice"].device.type, sides["voice_lengths"]) == ("meta", side)
    moved_names = {name for name, value in fields.items() if value is not getattr(batch, name)}
    assert moved_names == {"audio", "decoder_tokens", "tokens", "weights"}
    assert all(fields[name].device.type == "meta" for name in moved_names)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_yields_the_batches_of_its_sampler(
    store: datasets.Dataset, tokenizer: Tokenizer, num_workers: int
) -> None:
    train = RankSampler(TrainSampler(samples=SAMPLES, batch_seconds=2.0, seed=0), world_size=2)
    for sampler in (train, EvalSampler(samples=SAMPLES, batch_seconds=2.0)):
        loader = make_loader(
            store,
            sampler=sampler,
            collate=TextCollate(tokenizer),
            num_workers=num_workers,
            pin_memory=False,
        )
        batches = list(loader)
        assert len(batches) == len(loader) == len(sampler)
        for examples, batch in zip(sampler, batches, strict=True):
            assert batch.ids == [f"clip{example.rows[0]}" for example in examples]
            assert batch.weights.tolist() == [example.weight for example in examples]
            for example, audio in zip(examples, batch.audio, strict=True):
                original = clip(example.rows[0])
                assert np.array_equal(audio[: len(original)], original)


READING = """
import sys
import datasets
from sbkit.data.batch import TextCollate, make_loader
from sbkit.data.sampler import EvalSampler
from sbkit.text.tokenizer import Tokenizer

store = datasets.load_from_disk(sys.argv[1])
sampler = EvalSampler(samples=[1] * 5, batch_seconds=1e-4)
tokenizer = Tokenizer(model_file=sys.argv[2])
batches = iter(make_loader(
    store, sampler=sampler, collate=TextCollate(tokenizer), num_workers=2, pin_memory=False
))
next(batches)
sys.exit(75)
"""


def test_exit_in_mid_epoch_ends_workers_without_waiting(
    store: datasets.Dataset, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    store.save_to_disk(tmp_path / "store")
    process = processes.run(["-c", READING, tmp_path / "store", tokenizer.model_file])
    assert (process.returncode, process.stderr) == (75, "")


def test_joined_rows_are_concatenated_and_examples_ordered_by_speed(
    store: datasets.Dataset, tokenizer: Tokenizer
) -> None:
    examples = [Example((0, 2, 1), 24_100), Example((3,), 35_555, 90), Example((1,), 8_888, 90)]
    batch = TextCollate(tokenizer)(UtteranceDataset(store).__getitems__(examples))
    assert batch.ids == ["clip3", "clip1", "clip0+clip2+clip1"]
    assert batch.texts[2] == "one two  three"
    audio = batch.audio[2, : batch.audio_lengths[2]]
    assert np.array_equal(audio, np.concatenate([clip(0), clip(2), clip(1)]))
    assert batch.speed_groups == (SpeedGroup(90, 2, 32_000), SpeedGroup(100, 1, 24_100))
    assert batch.seconds == (32_000 + 8_000 + 24_100) / 16_000


SETTINGS = {
    "num_workers": 2,
    "batch_seconds": 100.0,
    "grad_accumulation_factor": 1,
    "eval_batch_seconds": 10.0,
    "sample_rate": 16_000,
    "shuffle_shards": 8,
    "store_cache": None,
    "output_folder": "nowhere",
}
NEEDED = 2 * 2 * 100 * 16_000 * 2  # batches of each, workers, seconds, samples, bytes


def test_too_little_shared_memory_leaves_out_the_workers(
    store: datasets.Dataset,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = type("Usage", (), {"free": 8 * NEEDED - 1})()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for num_workers, workers_with_room in ((2, 0), (1, 1)):
        loaders = make_loaders(
            Splits(store, {}, {}),
            {**SETTINGS, "seed": 1, "num_workers": num_workers},
            collate=TextCollate(tokenizer),
            placement=resolve_placement("cpu", "fp32"),
        )
        assert loaders.train.num_workers == workers_with_room
    assert (
        caplog.text.count("2 workers need 102 MB of shared memory, but only 102 MB are free") == 1
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's cleanup
@pytest.mark.parametrize(("call", "error", "after"), TORCH_REFUSALS)
def test_batches_are_read_without_workers_that_cannot_start(
    call: str,
    error: Exception,
    after: int,
    store: datasets.Dataset,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: Any = {"collate": TextCollate(tokenizer), "num_workers": 2, "pin_memory": False}
    sampler = EvalSampler(samples=SAMPLES, batch_seconds=2.0, sample_rate=16_000)
    loader = make_loader(store, sampler=sampler, **options)
    with refusing(call, error, after=after):
        ids = [id for _ in range(2) for batch in loader for id in batch.ids]
    assert sorted(ids) == sorted(2 * [*store["id"]])
    assert caplog.text.count("reading batches without workers: the system refuses them") == 1
    for worker in multiprocessing.active_children():
        if worker.daemon:  # one was started before the other was refused
            worker.join(timeout=60)
            assert not worker.is_alive()


def test_error_of_a_sampler_is_no_refusal_of_workers(
    store: datasets.Dataset, tokenizer: Tokenizer
) -> None:
    options: Any = {"collate": TextCollate(tokenizer), "num_workers": 1, "pin_memory": False}
    sampler = EvalSampler(samples=SAMPLES, batch_seconds=2.0, sample_rate=16_000)
    loader = make_loader(store, sampler=sampler, **options)
    gone = OSError("the store is gone")
    with (
        refusing("sbkit.data.sampler.Plan.__getitem__", gone),
        pytest.raises(OSError, match="the store is gone"),
    ):
        iter(loader)
    assert loader.num_workers == 1
    assert len([*loader]) == len(loader)


def test_features_of_a_large_training_set_are_measured_on_drawn_clips(
    store: datasets.Dataset, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from each part of the set, and the same ones on any number of ranks."""
    monkeypatch.setattr(batch_module, "MAX_MEASURED_CLIPS", 2)
    settings = {**SETTINGS, "num_workers": 0, "seed": 2, "eval_batch_seconds": 1e-4}

    def measured(rank: int, world_size: int) -> set[str]:
        monkeypatch.setattr(batch_module, "rank", lambda: rank)
        monkeypatch.setattr(batch_module, "world_size", lambda: world_size)
        loaders = make_loaders(
            Splits(store, {}, {}),
            settings,
            collate=TextCollate(tokenizer),
            placement=resolve_placement("cpu", "fp32"),
        )
        return {id for batch in loaders.for_statistics for id in batch.ids}

    early, late = sorted(measured(0, 1))
    assert early in ("clip0", "clip1") and late in ("clip2", "clip3", "clip4")
    assert [measured(rank, 2) for rank in (0, 1)] in ([{early}, {late}], [{late}, {early}])
