"""A back-off n-gram language model of words or tokens, in natural logarithms.

An n-gram of order n is known by its place among all of that order, sorted by the place of its first
n - 1 words and then by its last word: ``place * size + word``. So a model is a few sorted arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp

import numpy as np
import numpy.typing as npt

UNK, BOS, EOS = 0, 1, 2
SPECIAL = ("<unk>", "<s>", "</s>")
MEMORY = 2_000_000  # scores that are remembered

Keys = npt.NDArray[np.int64]
Logs = npt.NDArray[np.float32]
State = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NgramModel:
    """Probabilities of n-grams, and what to take off where one is unknown.

    Attributes:
        words: by their ids; ``SPECIAL`` come first, the others in order.
        keys: (M_n,) of each order, from 2 on, sorted.
        log_probs: (M_n,) of each order, from 1 on; natural logarithms.
        backoffs: (M_n,) of each order but the highest; natural logarithms.
    """

    words: tuple[str, ...]
    keys: tuple[Keys, ...]
    log_probs: tuple[Logs, ...]
    backoffs: tuple[Logs, ...]
    _scores: dict[tuple[State, int], tuple[float, State]] = field(default_factory=dict, repr=False)
    _places: dict[State, int] = field(default_factory=dict, repr=False)

    @property
    def order(self) -> int:
        """Return the number of words in the longest n-grams."""
        return len(self.log_probs)

    @property
    def start(self) -> State:
        """Return the state at the begin of a sentence."""
        return (BOS,) if self.order > 1 else ()

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def id_of(self, word: str) -> int:
        """Return the id of a word; unknown ones share one."""
        return self._ids.get(word, UNK)

    def score(self, state: State, word: int) -> tuple[float, State]:
        """Return the log-probability of a word after a state, and the state after it.

        A state is the longest end of the words so far that the model tells from a shorter one.
        """
        known = self._scores.get((state, word))
        if known is None:
            if len(self._scores) >= MEMORY:
                self._scores.clear()
                self._places.clear()
            known = self._scores[state, word] = self._score(state, word)
        return known

    def _score(self, state: State, word: int) -> tuple[float, State]:
        total = 0.0
        for start in range(len(state) + 1):
            context = state[start:]
            before = self._place(context)
            place = self._next(before, word, len(context))
            if place >= 0:
                longest = (*context, word)
                self._places[longest] = place
                return total + float(self.log_probs[len(context)][place]), self._context(longest)
            total += float(self.backoffs[len(context) - 1][before]) if before >= 0 else 0.0
        raise AssertionError("every word has a probability of its own")

    def _context(self, words: State) -> State:
        """Return the longest end of known words that is a context."""
        if len(words) < self.order:
            return words
        words = words[1:]
        while words and self._place(words) < 0:
            words = words[1:]
        return words

    def _place(self, words: State) -> int:
        """Return the place of an n-gram among those of its order; -1 where it is unknown."""
        place = self._places.get(words)
        if place is None:
            place = self._next(self._place(words[:-1]), words[-1], len(words) - 1) if words else 0
            self._places[words] = place
        return place

    def _next(self, place: int, word: int, length: int) -> int:
        """Return the place of a context's n-gram with a word; the context has ``length`` words."""
        if length == 0:
            return word
        keys, key = self.keys[length - 1], place * len(self.words) + word
        found = int(keys.searchsorted(key)) if place >= 0 else len(keys)
        return found if found < len(keys) and keys[found] == key else -1

    def sentence_log_prob(self, words: Sequence[str]) -> float:
        """Return the log-probability of a sentence and its end."""
        total, state = 0.0, self.start
        for word in (*map(self.id_of, words), EOS):
            log_prob, state = self.score(state, word)
            total += log_prob
        return total

    def perplexity(self, sentences: Iterable[Sequence[str]]) -> float:
        """Return the perplexity of sentences, whose ends count as words, too."""
        total, count = 0.0, 0
        for words in sentences:
            total += self.sentence_log_prob(words)
            count += len(words) + 1
        return exp(-total / max(1, count))
