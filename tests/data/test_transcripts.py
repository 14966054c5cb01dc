"""Transcripts read in one go: lengths, repeats, and what cannot be aligned, as CTC itself says."""

from collections.abc import Sequence

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import ctc_loss

from sbkit.data.splits import read_transcripts
from sbkit.models.subsampling import Subsampling
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from tests.stores import Utterance, make_store

TEXTS = ("hello", "a", "", "aab bb", "he! a")
FORTY_MS = Subsampling(stride=640, offset=240)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return ensure_tokenizer(
        model_file=file, kind="char", vocab_size=None, texts=lambda: ["hello ab"]
    )


def store(texts: Sequence[str], samples: Sequence[int]) -> datasets.Dataset:
    rows = enumerate(zip(texts, samples, strict=True))
    return make_store(Utterance(str(n), text, "", "", count, b"") for n, (text, count) in rows)


def test_read_transcripts_counts_every_row(tokenizer: Tokenizer) -> None:
    transcripts = read_transcripts(store(TEXTS, range(5)), tokenizer)
    assert transcripts.samples.tolist() == [0, 1, 2, 3, 4]
    assert transcripts.characters.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.labels.tolist() == [5, 1, 0, 6, 5]
    assert transcripts.frames_needed.tolist() == [6, 1, 0, 8, 5]  # one more for each repeat
    assert transcripts.unknown.tolist() == [False, False, False, False, True]
    assert not transcripts.refused.any()


def test_read_transcripts_marks_ids_that_no_loss_accepts(tokenizer: Tokenizer) -> None:
    class Broken(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return {"a": [self.vocab_size], "": [-1], "hello": [0]}.get(text, [4, 4])

    broken = Broken(model_file=tokenizer.model_file)
    transcripts = read_transcripts(store(TEXTS, range(5)), broken)
    assert transcripts.refused.tolist() == [True, True, True, False, False]


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
