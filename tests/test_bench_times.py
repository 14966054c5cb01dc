"""Word times: compared with the truth, fitted to it, and the same for every decoder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import soundfile

from sbkit.base.arrays import LogProbs
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.protocols import Encoded
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.greedy import best_tokens
from sbkit.decoding.words import WordOffsets
from sbkit.runtime.torch_model import TorchModel, load_bundle
from sbkit.text.tokenizer import SPACE
from sbkit.text.word import Word
from tests.decoding.spoken import train_models
from tests.runtime.bundles import make_bundle
from tools.bench_times import compare_times, fit_offsets, time_source

FRAME = 0.04  # seconds
SPOKEN = "hello▁▁▁▁▁▁▁▁▁▁▁▁there▁there"  # from frame 10 on, two frames for each token


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of a tiny model."""
    return make_bundle(tmp_path_factory.mktemp("times"))


def log_probs_of(bundle: Bundle, *, frames: int = 100) -> LogProbs:
    """Return log-probabilities (U, V) in which SPOKEN is nearly certain.

    The last of the twelve spaces could also be the start of the t.
    """
    assert bundle.tokenizer is not None
    pieces = bundle.tokenizer.pieces()
    best = np.zeros(frames, np.int64)
    for index, letter in enumerate(SPOKEN):
        best[10 + 2 * index] = pieces.index(letter)
    scores = np.full((frames, len(pieces)), 0.001) + 0.9 * np.eye(len(pieces))[best]
    scores[42, [pieces.index(SPACE), pieces.index("t")]] = 0.5, 0.4
    scores[43, [0, pieces.index("t")]] = 0.6, 0.3
    return np.log(scores).astype(np.float32)


@contextmanager
def encoding(loaded: Bundle) -> Iterator[None]:
    """Make every model return the log-probabilities of SPOKEN for every clip."""
    with patch.object(TorchModel, "encode", lambda *_: [Encoded(log_probs_of(loaded))]):
        yield


def make_decoder(loaded: Bundle, folder: Path) -> BeamDecoder:
    """Return a beam decoder whose token model has never seen two spaces in a row."""
    assert loaded.tokenizer is not None
    file = folder / "lm.safetensors"
    texts = ["hello there there", "a quick brown fox"]
    train_models(file, loaded.tokenizer, texts, words=0)
    return BeamDecoder(
        tokenizer=loaded.tokenizer, language_models=file, weights={"token": 10.0, "token_bonus": 0}
    )


def tokens_of(loaded: Bundle) -> str:
    """Decode the clip and return its tokens unchanged."""
    assert loaded.tokenizer is not None
    log_probs = log_probs_of(loaded)
    if loaded.decoder is None:
        ids = best_tokens(log_probs, loaded.tokenizer.vocabulary.blank)
    else:
        ids = list(loaded.decoder.nbest(log_probs)[0].tokens)
    return "".join(map(loaded.tokenizer.piece, ids))


def recognize(loaded: Bundle, words: str | None = None) -> tuple[Word, ...]:
    """Recognize the clip, or align words with it."""
    clip = [np.zeros(64_000, np.int16)]
    with encoding(loaded):
        if words is None:
            return loaded.recognize(clip, times=True)[0].words
        return loaded.align(clip, [words])[0]


def test_word_times_do_not_depend_on_the_decoder(bundle: Path, tmp_path: Path) -> None:
    """Greedy decoding emits twelve spaces, a beam one; the times follow from the text."""
    loaded = load_bundle(bundle)
    words = recognize(loaded)
    assert [word.text for word in words] == ["hello", "there", "there"]
    beam = replace(loaded, decoder=make_decoder(loaded, tmp_path))
    spaces = [tokens_of(decoding).count(SPACE) for decoding in (loaded, beam)]
    assert spaces == [13, 2]
    assert recognize(beam) == words
    assert recognize(loaded, "hello there there") == words


def test_compare_times_counts_only_correct_words() -> None:
    truth = [Word("a", 0.0, 1.0), Word("b", 1.0, 2.0), Word("c", 2.0, 3.0)]
    measured = [
        *(Word("a", 0.04, 1.2), Word("x", 1.3, 1.4)),
        *(Word("y", 1.4, 1.5), Word("c", 1.91, 3.0)),
    ]
    median, mean = pytest.approx(65), pytest.approx(82.5)
    assert compare_times([(truth, measured), ([], [])]) == {
        **{"words": "2 of 3", "median (ms)": median, "mean (ms)": mean},
        **{"within 50 ms": "50.0%", "within 100 ms": "75.0%"},
        **{"starts (ms)": "-25", "ends (ms)": "+100"},
    }
    assert compare_times([(truth, [])])["words"] == "0 of 3"


def write_table(folder: Path, times: str) -> Path:
    soundfile.write(folder / "a.wav", np.zeros(64_000, np.int16), 16_000)
    file = folder / "data.csv"
    file.write_text(f"path,text,word_times\na.wav,hello there there,{times}\n")
    return file


def test_fit_offsets_writes_medians_at_pauses_into_the_bundle(bundle: Path, tmp_path: Path) -> None:
    """Starts are fitted after pauses, ends before pauses; other words do not count."""
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    source = write_table(tmp_path, "0.32-0.86 1.60-2.00 2.00-2.70")
    with encoding(load_bundle(other)):
        fitted = fit_offsets(other, source)
        (text,) = time_source(load_bundle(other), source)
    assert fitted == WordOffsets(-2.0, 2.5)
    assert load_bundle(other).config.word_offsets == fitted
    assert text.recognized == text.aligned
    assert text.aligned[0].end == pytest.approx(0.86)
