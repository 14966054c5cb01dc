"""Scores of token sequences by their definition, and small models to compare them with."""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, product
from math import inf, log
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from sbkit.decoding.prefix_beam import BeamSettings, PrefixScorer
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import NgramModel
from sbkit.text.tokenizer import Tokenizer

CHARACTERS = ("<blank>", "▁", "a", "b")
PIECES = ("<blank>", "▁a", "b", "▁")  # some begin a word, others continue it
SETTINGS = BeamSettings(vocab_size=4, beam_size=1 << 20)  # practically unbounded
BEAM_OF_16 = BeamSettings(vocab_size=4, beam_size=16)


class LettersTokenizer(Tokenizer):
    """Spell the longest piece first, as sentencepiece does with so few; one id is special."""

    vocabulary = SimpleNamespace(special=(0,), size=4, blank=0)  # type: ignore[assignment]
    silent = ()  # a token may be appended at any frame

    def __init__(self, pieces: Sequence[str]) -> None:
        self._all_pieces = pieces

    def pieces(self) -> list[str]:
        return [*self._all_pieces]

    def encode(self, text: str) -> list[int]:
        pieces, prefix = self._all_pieces, "" if self._all_pieces == CHARACTERS else "▁"
        longest_first = sorted(pieces[1:], key=len, reverse=True)
        spelling = re.findall("|".join([*longest_first, "."]), prefix + text.replace(" ", "▁"))
        return [pieces.index(piece) if piece in pieces else 0 for piece in spelling]


def random_model(words: Sequence[str], seed: int) -> NgramModel:
    numbers = random.Random(seed)
    sentences = (numbers.choices(words, k=numbers.randint(1, 6)) for _ in range(60))
    return train(sentences, order=3).model


def random_matrices(count: int, *, seed: int = 0) -> list[npt.NDArray[np.float64]]:
    """Make log-probabilities of 0 to 6 frames, one entry in ten impossible."""
    numbers = np.random.default_rng(seed)
    matrices = []
    for index in range(count):
        scores = numbers.normal(scale=numbers.uniform(0.3, 3), size=(index % 7, 4))
        scores[numbers.random(scores.shape) < 0.1] = -inf
        scores[np.isneginf(scores).all(1), 0] = 0
        with np.errstate(divide="ignore"):
            matrices.append(scores - np.log(np.exp(scores).sum(1, keepdims=True)))
    return matrices


@cache
def _paths(frames: int) -> tuple[npt.NDArray[np.int64], tuple[tuple[int, ...], ...]]:
    paths = list(product(range(4), repeat=frames))
    merged = [tuple(token for token, _ in groupby(path) if token) for path in paths]
    return np.array(paths, dtype=np.int64).reshape(len(paths), frames), tuple(merged)


def enumerate_paths(log_probs: npt.NDArray[np.float64]) -> dict[tuple[int, ...], float]:
    """Add up all 4^U paths: return ln p of each possible token sequence."""
    paths, merged = _paths(len(log_probs))
    probabilities = np.exp(log_probs)[np.arange(len(log_probs)), paths].prod(1)
    totals = dict[tuple[int, ...], float]()
    for tokens, probability in zip(merged, probabilities.tolist(), strict=True):
        totals[tokens] = totals.get(tokens, 0.0) + probability
    return {tokens: log(total) for tokens, total in totals.items() if total}


def best_alignments(log_probs: npt.NDArray[np.float64]) -> dict[tuple[int, ...], float]:
    """Return the best of the 4^U alignments of each token sequence."""
    paths, merged = _paths(len(log_probs))
    scores = log_probs[np.arange(len(log_probs)), paths].sum(1).tolist()
    best = dict[tuple[int, ...], float]()
    for tokens, score in zip(merged, scores, strict=True):
        best[tokens] = max(best.get(tokens, -inf), score)
    return best


def words_of(tokens: Sequence[int], pieces: Sequence[str]) -> list[str]:
    return "".join(pieces[token] for token in tokens).replace("▁", " ").split()


def sentence_log_prob(model: NgramModel, words: Sequence[str]) -> float:
    total, state = 0.0, model.start
    for word in [model.id_of(word) for word in words] + [2]:
        log_prob, state = model.advance(state, word)
        total += log_prob
    return total


def steps_of(scorer: PrefixScorer, tokens: Sequence[int], *, ends: bool = True) -> Iterator[float]:
    """Yield the score of each token, and that of the end."""
    state = scorer.start()
    for token in tokens:
        score, state = scorer.advance(state, token)
        yield score
    if ends:
        yield scorer.end(state)


def count_rewards(words: Sequence[str], phrases: Sequence[str]) -> float:
    """Add up the reward at each word: the largest among the phrases that end with it."""
    total = 0.0
    for end in range(1, len(words) + 1):
        texts = [" ".join(words[begin:end]) for begin in range(end)]
        total += max((min(1, len(text) / 4) for text in texts if text in phrases), default=0.0)
    return total


def best_of(scores: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    return max(scores, key=scores.__getitem__)
