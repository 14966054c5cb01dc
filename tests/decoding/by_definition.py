"""Scores of token sequences by their definition, and the little models that they are about."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from math import inf, log
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from sbkit.decoding.prefix_beam import BeamSettings
from sbkit.lm.ngram import NO_HISTORY, NgramModel
from sbkit.text.tokenizer import Tokenizer

CHARACTERS = ("<blank>", "▁", "a", "b")  # three letters, one of them the space
PIECES = ("<blank>", "▁a", "b", "▁")  # a word begins with a space, or goes on
SETTINGS = BeamSettings(vocab_size=4, beam_size=1 << 20)  # as good as without bounds
BEAM_OF_16 = BeamSettings(vocab_size=4, beam_size=16)


class LettersTokenizer(Tokenizer):
    """Spell the longest piece first, as sentencepiece does with so few; one id is special."""

    vocabulary = SimpleNamespace(special=(0,), size=4)  # type: ignore[assignment]

    def __init__(self, pieces: Sequence[str]) -> None:
        self._known = pieces

    def pieces(self) -> list[str]:
        return [*self._known]

    def encode(self, text: str) -> list[int]:
        rest = text.replace(" ", "▁")
        rest = rest if self._known == CHARACTERS else f"▁{rest}"
        ids = []
        while rest:
            matches = [n for n, piece in enumerate(self._known) if n and rest.startswith(piece)]
            token = max(matches, key=lambda n: len(self._known[n]), default=0)
            rest = rest[len(self._known[token]) if matches else 1 :]
            ids.append(token)
        return ids


@dataclass(frozen=True, eq=False)
class RandomModel:
    """A back-off 3-gram of random numbers, no distribution: a search must not care."""

    words: tuple[str, ...]
    log_probs: dict[tuple[int, ...], float]
    backoffs: dict[tuple[int, ...], float]

    @property
    def start(self) -> tuple[int, ...]:
        return (1,)

    def id_of(self, word: str) -> int:
        return self.words.index(word) if word in self.words else 0

    def score(self, state: tuple[int, ...], word: int) -> tuple[float, tuple[int, ...]]:
        state = state or ()  # NO_HISTORY is 0
        paid, history = 0.0, state
        while (*history, word) not in self.log_probs:
            paid += self.backoffs.get(history, 0.0)
            history = history[1:]
        return paid + self.log_probs[(*history, word)], (*state, word)[-2:]


def random_model(words: Sequence[str], seed: int) -> RandomModel:
    drawn = random.Random(seed)
    names = ("<unk>", "<s>", "</s>", *words)
    ids = range(len(names))
    grams = [gram for n in (1, 2, 3) for gram in product(ids, repeat=n)]
    used = [gram for gram in grams if len(gram) == 1 or drawn.random() < 0.4]
    return RandomModel(
        names,
        {gram: log(drawn.uniform(0.01, 0.9)) for gram in used},
        {gram: log(drawn.uniform(0.1, 0.9)) for gram in used if len(gram) < 3},
    )


def random_matrices(count: int, *, seed: int = 0) -> list[npt.NDArray[np.float64]]:
    """Make log-probabilities of 0 to 6 frames, one entry in ten impossible."""
    drawn = np.random.default_rng(seed)
    matrices = []
    for number in range(count):
        scores = drawn.normal(scale=drawn.uniform(0.3, 3), size=(number % 7, 4))
        scores[drawn.random(scores.shape) < 0.1] = -inf
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
    """Add up all 4^U paths: ln p of each token sequence that is possible."""
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


def state_after(model: NgramModel, *words: int) -> int:
    """Return the state after words that need not begin with `<s>`."""
    state = NO_HISTORY
    for word in words:
        _, state = model.score(state, word)
    return state


def sentence_log_prob(model: "NgramModel | RandomModel", words: Sequence[str]) -> float:
    total, state = 0.0, model.start
    for word in [model.id_of(word) for word in words] + [2]:
        log_prob, state = model.score(state, word)
        total += log_prob
    return total


def count_rewards(words: Sequence[str], phrases: Sequence[str]) -> float:
    """Add up, for each word, the largest share that a phrase which ends with it earns."""
    total = 0.0
    for end in range(1, len(words) + 1):
        texts = [" ".join(words[begin:end]) for begin in range(end)]
        total += max((min(1, len(text) / 4) for text in texts if text in phrases), default=0.0)
    return total


def best_of(scores: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    return max(scores, key=scores.__getitem__)
