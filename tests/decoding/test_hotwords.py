"""Hotwords are found as whole words, rewarded once, and change nothing where they are not heard."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.hotwords import Hotwords, HotwordScorer, read_hotwords
from sbkit.decoding.language_models import LanguageModels
from sbkit.decoding.prefix_beam import LogProbs, PrefixBeam
from sbkit.lm.kneser_ney import train
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from tests.decoding.test_prefix_beam import PIECES, enumerate_all, matrix

PHRASES = ("ab", "a b", "b a")
REWARD = 3.0


def scorer(phrases: tuple[str, ...] = PHRASES) -> HotwordScorer:
    return HotwordScorer(phrases=phrases, pieces=PIECES, reward=REWARD)


def by_hand(tokens: tuple[int, ...]) -> float:
    """Add the reward of every phrase in the words of a text."""
    words = "".join(PIECES[token] for token in tokens).replace("▁", " ").split()
    total = 0.0
    for phrase in PHRASES:
        spelled = phrase.split()
        places = range(len(words) - len(spelled) + 1)
        found = sum(words[place : place + len(spelled)] == spelled for place in places)
        total += found * REWARD * min(1.0, len(phrase) / 4)
    return total


def test_every_phrase_of_a_text_is_rewarded_once() -> None:
    judge = scorer()
    for tokens in itertools.product((1, 2, 3), repeat=6):
        score, state = 0.0, judge.start()
        for token in tokens:
            added, state = judge.step(state, token)
            score += added
        assert score + judge.end(state) == pytest.approx(by_hand(tokens), abs=1e-9)


def test_the_beam_with_hotwords_is_exact() -> None:
    beam = PrefixBeam(
        scorer=scorer(), blank=0, beam_size=None, max_candidates=None, min_log_prob=None
    )
    small, best_found = replace(beam, beam_size=16), 0
    for seed in range(60):
        log_probs = matrix(seed)
        every = {
            tokens: score + by_hand(tokens)
            for tokens, score in enumerate_all(log_probs, "none").items()
        }
        for each in beam.decode(log_probs, nbest=len(every)):
            assert each.score == pytest.approx(every[each.tokens], abs=1e-9)
        best = small.decode(log_probs)[0]
        best_found += every[best.tokens] == pytest.approx(max(every.values()), abs=1e-9)
    assert best_found >= 54


TEXTS = ["call the north office", "send it to the office", "the north is cold"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return ensure_tokenizer(
        model_file=tmp_path_factory.mktemp("tokenizer") / "tokenizer.model",
        kind="char",
        vocab_size=None,
        texts=lambda: [*TEXTS, "a quick brown fox jumps over the lazy dog"],
    )


def decoder(tokenizer: Tokenizer) -> BeamDecoder:
    words = train([text.split() for text in TEXTS], order=2).model
    return BeamDecoder(
        tokenizer=tokenizer, language_models=LanguageModels(words, None), weights={"token": 0}
    )


def spoken(tokenizer: Tokenizer, text: str, other: dict[int, str]) -> LogProbs:
    """Write log-probabilities of a text, in which some letters sound almost like others."""
    tokens = tokenizer.encode(text)
    probs = np.full((2 * len(tokens), tokenizer.vocab_size), 1e-4)
    for place, token in enumerate(tokens):
        probs[2 * place, token] = 0.45 if place in other else 1.0
        if place in other:
            probs[2 * place, tokenizer.encode(other[place])[-1]] = 0.55
        probs[2 * place + 1, tokenizer.vocabulary.blank] = 1.0
    scores: LogProbs = np.log(probs / probs.sum(1, keepdims=True))
    return scores


def heard(with_hotwords: BeamDecoder, log_probs: LogProbs) -> str:
    batch = torch.from_numpy(log_probs)[None]
    (tokens,) = with_hotwords.decode(batch, torch.tensor([len(log_probs)]))
    return with_hotwords.tokenizer.decode(tokens)


def test_a_hotword_that_no_text_had_is_heard(tokenizer: Tokenizer) -> None:
    """What was said is "call zoe"; the z sounds a little more like an s."""
    plain, log_probs = decoder(tokenizer), spoken(tokenizer, "call zoe", {5: "s"})
    assert heard(plain, log_probs) == "call soe"
    assert heard(plain.with_hotwords(["zoe"]), log_probs) == "call zoe"


def test_a_list_that_is_not_spoken_changes_nothing(tokenizer: Tokenizer) -> None:
    plain = decoder(tokenizer)
    expecting = plain.with_hotwords(["maximilian", "jupiter", "the north pole"])
    for text in TEXTS:
        log_probs = spoken(tokenizer, text, {3: "x", 8: "q"})
        assert heard(expecting, log_probs) == heard(plain, log_probs)


def test_what_cannot_be_spelled_is_named(tokenizer: Tokenizer) -> None:
    named = ["Zoe", " zoe ", "日本", "", "!", "the café"]
    found = Hotwords.of(
        named, normalize=lambda text: text.strip(" !").lower(), pieces=tokenizer.pieces()
    )
    assert found.phrases == ("zoe",)
    assert found.unspellable == ("日本", "!", "the café")


def test_a_list_is_a_file_or_words_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("new york\n\nzoe\n", encoding="utf-8")
    assert list(read_hotwords(str(file))) == ["new york", "", "zoe"]
    assert list(read_hotwords("new york,zoe")) == ["new york", "zoe"]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SbkitError, match="must be a UTF-8 text with a phrase on each line"):
        list(read_hotwords(str(file)))
