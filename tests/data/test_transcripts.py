"""Transcripts read in one go: lengths, repeats, and what cannot be aligned, as CTC itself says."""

from collections.abc import Sequence

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import ctc_loss

from sbkit.data.transcripts import read_transcripts
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


def test_every_row_is_counted(tokenizer: Tokenizer) -> None:
    found = read_transcripts(store(TEXTS, range(5)), tokenizer)
    assert found.samples.tolist() == [0, 1, 2, 3, 4]
    assert found.characters.tolist() == [5, 1, 0, 6, 5]
    assert found.labels.tolist() == [5, 1, 0, 6, 5]
    assert found.frames_needed.tolist() == [6, 1, 0, 8, 5]  # no repeat spans two rows
    assert found.unknown.tolist() == [False, False, False, False, True]
    assert not found.refused.any()
    assert found.alphabet == frozenset("helo ab!")


def test_a_label_that_no_loss_may_see_is_marked(tokenizer: Tokenizer) -> None:
    class Broken(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return {"a": [self.vocab_size], "": [-1], "hello": [0]}.get(text, [4, 4])

    broken = Broken(model_file=tokenizer.model_file)
    found = read_transcripts(store(TEXTS, range(5)), broken)
    assert found.refused.tolist() == [True, True, True, False, False]


def test_what_lacks_frames_is_what_ctc_cannot_align(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    texts = ["".join(random.choice([*"helo ab"], random.integers(1, 9))).strip() for _ in range(60)]
    texts = [" ".join(text.split()) or "a" for text in texts]
    samples = random.integers(400, 8000, len(texts)).tolist()
    found = read_transcripts(store(texts, samples), tokenizer)
    frames = torch.from_numpy(found.frames(FORTY_MS))
    tokens = [torch.tensor(tokenizer.encode(text)) for text in texts]
    losses = ctc_loss(
        torch.zeros(int(frames.max()), len(texts), tokenizer.vocab_size).log_softmax(-1),
        torch.cat(tokens),
        frames,
        torch.tensor([len(each) for each in tokens]),
        blank=tokenizer.vocabulary.blank,
        reduction="none",
    )
    lacking = np.flatnonzero(losses.isinf().numpy())
    assert 5 < len(lacking) < 55
    assert found.lacking(FORTY_MS).tolist() == lacking.tolist()
    faster = set(found.lacking(FORTY_MS, percent=150).tolist())
    assert faster > set(lacking.tolist())
