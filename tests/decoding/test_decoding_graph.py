"""The best path through a decoding graph is the best by the definition of its scores."""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.asr.data import prepare_language_models
from sbkit.base.errors import SbkitError
from sbkit.data.splits import Splits
from sbkit.decoding.decoder import DecoderWeights
from sbkit.decoding.decoding_graph import GraphDecoder
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import LanguageModels
from sbkit.lm.ngram import END, UNKNOWN, Automaton, NgramModel, make_automaton
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.by_definition import (
    CHARACTERS,
    PIECES,
    LettersTokenizer,
    best_alignments,
    best_of,
    random_matrices,
)
from tests.decoding.spoken import char_tokenizer, silence, spoken, train_models, transcribe
from tests.lm.test_ngram import rows

WEIGHTS = {"word": 0.8, "word_bonus": 0.3, "unknown_word": -1.0}
SENTENCES = ["a b", "b a b", "ab a", "ab b a", "a a b", "b ab"]
TEXTS = ["call the north office", "send it to the office", "it is cold in the north"] * 3


class ByDefinition:
    """Scores of token sequences: each word as a known and as an unknown word, all back-offs.

    A path may back off where it need not, and so forget its history, as in all of Kaldi's graphs.
    """

    def __init__(self, model: NgramModel, tokenizer: Tokenizer) -> None:
        self._pieces, self._words = tokenizer.pieces(), Walks(make_automaton(model))
        words, encode = model.words[3:], tokenizer.encode
        first = {word: tuple(encode(word)) for word in words}
        later = {word: tuple(encode(f"{word} {word}"))[len(first[word]) :] for word in words}
        self._known = [
            {tokens: model.id_of(word) for word, tokens in spellings.items()}
            for spellings in (first, later)
        ]
        self._letters = [
            train((list(map(str, tokens)) for tokens in spellings.values()), order=3).model
            for spellings in (first, later)
        ]
        self._spellings = [
            Walks(make_automaton(letters), forgets_start=letters is self._letters[0])
            for letters in self._letters
        ]
        self.score = cache(self._score)

    def _score(self, tokens: tuple[int, ...]) -> float:
        """Return the best score of the language models, -inf if the tokens spell no text."""
        starts = [n for n, token in enumerate(tokens) if n == 0 or self._begins(token)]
        words = [tokens[a:b] for a, b in pairwise([*starts, len(tokens)])]
        return max(self._of_words(words), self._of_words([(), *words]))

    def _begins(self, token: int) -> bool:
        return self._pieces[token].startswith("▁")

    def _of_words(self, words: Sequence[tuple[int, ...]]) -> float:
        readings = (self._readings(tokens, index > 0) for index, tokens in enumerate(words))
        return max(map(self._sentence, product(*map(list, readings))), default=-inf)

    def _readings(self, tokens: tuple[int, ...], later: bool) -> Iterator[tuple[int, float]]:
        if tokens in self._known[later]:
            yield self._known[later][tokens], 0.0
        letters = self._letters[later]
        ids = [letters.id_of(str(token)) for token in tokens]
        first_tokens = [spelling[0] for spelling in self._known[later]]
        begins = not tokens or tokens[0] in first_tokens or not (later or self._begins(tokens[0]))
        if begins and UNKNOWN not in ids:
            log_prob = self._spellings[later].best(ids)
            yield UNKNOWN, WEIGHTS["unknown_word"] + WEIGHTS["word"] * log_prob

    def _sentence(self, readings: Sequence[tuple[int, float]]) -> float:
        log_prob = self._words.best([word for word, _ in readings])
        added = sum(score + WEIGHTS["word_bonus"] for _, score in readings)
        return WEIGHTS["word"] * log_prob + added


class Walks:
    """The paths of a sentence through an automaton; a path may back off anywhere."""

    def __init__(self, automaton: Automaton, *, forgets_start: bool = True) -> None:
        self._start = automaton.start
        self._arcs, self._ends = rows(automaton.words), rows(automaton.ends)
        self._backoffs = {source: to for (source, _), to in rows(automaton.backoffs).items()}
        if not forgets_start:
            del self._backoffs[automaton.start]

    def best(self, words: Sequence[int], state: int | None = None) -> float:
        """Return the best score of the rest of a sentence after a state."""
        state, best = self._start if state is None else state, -inf
        if not words and (state, END) in self._ends:
            best = self._ends[state, END][1]
        elif words and (state, words[0]) in self._arcs:
            target, weight = self._arcs[state, words[0]]
            best = weight + self.best(words[1:], target)
        if state in self._backoffs:
            target, weight = self._backoffs[state]
            best = max(best, weight + self.best(words, target))
        return best


@pytest.mark.parametrize("pieces", [CHARACTERS, PIECES])
def test_decoder_finds_the_best_path_by_definition(pieces: Sequence[str]) -> None:
    tokenizer = LettersTokenizer(pieces)
    model = train((text.split() for text in SENTENCES), order=3).model
    models = LanguageModels(words=model, tokens=None)
    decoder = GraphDecoder(tokenizer=tokenizer, language_models=models, weights=WEIGHTS)
    definition, num_compared = ByDefinition(model, tokenizer), 0
    for log_probs in filter(len, random_matrices(42)):
        (hypothesis,) = decoder.nbest(log_probs)
        scores = {
            tokens: score + definition.score(tokens)
            for tokens, score in best_alignments(log_probs).items()
        }
        *_, second, best = sorted([-inf, -inf, *scores.values()])
        if best == -inf:
            continue
        num_compared += 1
        # Weights are rounded to a thousandth.
        assert hypothesis.score == pytest.approx(best, abs=0.01)
        assert scores[hypothesis.tokens] == pytest.approx(best, abs=0.02)
        assert hypothesis.score == hypothesis.ctc_score + hypothesis.lm_score
        if second < best - 0.02:
            assert hypothesis.tokens == best_of(scores)
    assert num_compared > 25


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS)


def graph_of(folder: Path, tokenizer: Tokenizer, *, order: int = 2, **options: Any) -> GraphDecoder:
    file = folder / "lm.safetensors"
    train_models(file, tokenizer, TEXTS, words=order)
    options = {"weights": DecoderWeights(word=1.0), **options}
    return GraphDecoder(tokenizer=tokenizer, language_models=file, **options)


def test_decoder_corrects_words_by_the_language_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Two letters of each text sound more like others; "dan" is in no text."""
    decoder = graph_of(tmp_path, tokenizer)
    for text in TEXTS[:3]:
        log_probs = spoken(tokenizer, text, {3: "s", 8: "m"})
        assert transcribe(decoder, log_probs) == text
    for text in ("call dan in the north", "dan is cold"):
        assert transcribe(decoder, spoken(tokenizer, text, {})) == text
    (nothing,) = decoder.nbest(np.zeros((0, tokenizer.vocab_size)))
    assert (nothing.tokens, nothing.score, nothing.lm_score) == ((), 0.0, 0.0)


def test_nothing_is_written_where_greedy_decoding_hears_nothing(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    eager = graph_of(tmp_path, tokenizer, weights={"word": 0.5, "word_bonus": 8.0})
    pause = silence(tokenizer, 100, blank=0.5)
    office = spoken(tokenizer, "office", {})
    assert transcribe(eager, pause) == ""
    assert transcribe(eager, np.concatenate([pause, office, pause, office])) == "office office"


def test_graph_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    decoder = graph_of(tmp_path, tokenizer)
    (tmp_path / "other").mkdir()
    decoder.tokenizer = char_tokenizer(tmp_path / "other", ["xyz"])
    with pytest.raises(SbkitError, match="belong to another tokenizer"):
        decoder.nbest(np.zeros((2, 7)))


def test_graph_refuses_what_it_cannot_do(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = graph_of(tmp_path, tokenizer)
    with pytest.raises(SbkitError, match="finds a single hypothesis"):
        graph_of(tmp_path, tokenizer, attention_rescoring=True).check()
    with pytest.raises(SbkitError, match="Hotwords need the beam decoder"):
        decoder.with_hotwords(["sam"])
    with pytest.raises(SbkitError, match="needs a language model of words, but there is none"):
        graph_of(tmp_path, tokenizer, order=0).nbest(np.zeros((1, tokenizer.vocab_size)))
    with pytest.raises(SbkitError, match="needs a language model of words, but `word_lm_ord"):
        knobs = {"decoder_type": "graph", "word_lm_order": 0}
        prepare_language_models(knobs, Splits(None, {}, {}), tokenizer)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "kaldi_decoder", None)
    with pytest.raises(SbkitError, match=r"Install it: pip install 'sbkit\[graph\]'"):
        decoder.check()
