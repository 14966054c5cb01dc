"""A back-off n-gram model in sorted arrays, which scores text word by word.

Legend: V words, N n-grams of one order. An n-gram of order n is a row of that order's arrays; its
key is (row of its first n - 1 words in order n - 1) * V + (id of its last word). So the n-grams
that share a context stand side by side, and one binary search per word finds any of them.

A state is the shortest history that predicts as well as all words so far: the number of an n-gram,
counted from 1 through all orders, or NO_HISTORY.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Float32s, Int64s

NO_HISTORY = 0  # a state

UNKNOWN, BEGIN, END = 0, 1, 2  # ids
SPECIAL = ("<unk>", "<s>", "</s>")  # by id
LARGEST_ORDER = 10


@dataclass(frozen=True, eq=False)
class Grams:
    """The n-grams of one order, sorted by key.

    keys: (N,); log_probs: (N,) natural logarithms; backoffs: (N,) natural logarithms of the weight
    that a longer n-gram pays where it is not there, 0 where none is.
    """

    keys: Int64s
    log_probs: Float32s
    backoffs: Float32s

    def __len__(self) -> int:
        """Count them."""
        return len(self.keys)


class Numbered(NamedTuple):
    """The n-grams of all orders by number, (N + 1,) each; number 0 is none.

    contexts: the number of each one's first words; words: its last one; log_probs, backoffs: as in
    `Grams`; shorter: the state to back off to; states: the state after all its words; begins: the
    number of the first n-gram that has it as context, or would, (N + 2,).
    """

    contexts: Int64s
    words: Int64s
    log_probs: Float32s
    backoffs: Float32s
    shorter: Int64s
    states: Int64s
    begins: Int64s


@dataclass(frozen=True, eq=False)
class NgramModel:
    """An n-gram model with back-off, as an ARPA file describes it.

    words: by id, `<unk>`, `<s>`, `</s>`, then the others in the order of their code points;
    grams: by order; the unigrams are all V words, so that the row of one is its id.
    """

    words: tuple[str, ...]
    grams: tuple[Grams, ...]

    def __reduce__(self) -> tuple[type["NgramModel"], tuple[tuple[str, ...], tuple[Grams, ...]]]:
        """Pickle the model without its cached tables, for processes that decode."""
        return type(self), (self.words, self.grams)

    @property
    def order(self) -> int:
        """Return the number of words in the longest n-grams."""
        return len(self.grams)

    @cached_property
    def start(self) -> int:
        """Return the state after `<s>`."""
        return self.score(NO_HISTORY, BEGIN)[1]

    def __contains__(self, word: object) -> bool:
        """Check whether a word has an id of its own."""
        return word in self._ids

    def id_of(self, word: str) -> int:
        """Return the id of a word, that of `<unk>` where it is unknown."""
        return self._ids.get(word, UNKNOWN)

    def score(self, state: int, word: int) -> tuple[float, int]:
        """Return the natural log-probability of a word after a state, and the state after it.

        Two histories with equal states have equal futures.
        """
        words, log_probs, backoffs, shorter, states, begins = self._columns
        paid = 0.0
        while state:
            end = begins[state + 1]
            number = bisect_left(words, word, begins[state], end)
            if number < end and words[number] == word:
                return paid + log_probs[number], states[number]
            paid += backoffs[state]
            state = shorter[state]
        return paid + log_probs[1 + word], states[1 + word]

    def numbered(self) -> Numbered:
        """Number the n-grams, and find the states: those with successors or a back-off weight."""
        size = len(self.words)
        firsts = [0, *np.cumsum([1, *map(len, self.grams)]).tolist()]  # numbers, of each order
        orders = zip(self.grams, firsts, strict=False)
        keys = np.concatenate([[0], *(each.keys + first * size for each, first in orders)])
        none = np.zeros(1, np.float32)
        log_probs = np.concatenate([none, *(each.log_probs for each in self.grams)])
        backoffs = np.concatenate([none, *(each.backoffs for each in self.grams)])
        begins = 1 + np.searchsorted(keys[1:], size * np.arange(len(keys) + 1))
        kept = (backoffs != 0) | (begins[1:] > begins[:-1])
        kept[firsts[-2] :] = False  # of the highest order
        contexts, words = np.divmod(keys, size)
        shorter, states = np.zeros_like(keys), np.zeros_like(keys)
        for first, end in pairwise(firsts[1:]):
            own = slice(first, end)
            if first > 1:
                suffixes = _longest(keys, shorter, shorter[contexts[own]], words[own], size)
                shorter[own] = states[suffixes]
            states[own] = np.where(kept[own], np.arange(first, end), shorter[own])
        return Numbered(contexts, words, log_probs, backoffs, shorter, states, begins)

    # `data` gives Python's own numbers, in 40 ns instead of 100.
    @cached_property
    def _columns(self) -> tuple[memoryview, ...]:
        made = self.numbered()
        numbers = (made.words, made.shorter, made.states, made.begins)
        words, *others = (each.astype(np.uint32).data for each in numbers)
        return words, made.log_probs.data, made.backoffs.data, *others

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def _longest(keys: Int64s, shorter: Int64s, states: Int64s, words: Int64s, size: int) -> Int64s:
    """Return the longest n-gram of each word after a state, or after one that it backs off to."""
    found, left = np.zeros_like(words), np.arange(len(words))
    while len(left):
        wanted = states[left] * size + words[left]
        numbers = 1 + np.searchsorted(keys[1:], wanted)
        is_there = keys[np.minimum(numbers, len(keys) - 1)] == wanted
        found[left[is_there]] = numbers[is_there]
        left = left[~is_there]
        states[left] = shorter[states[left]]
    return found


Arc = tuple[int, int, int, float]  # two states, a word's id, a natural logarithm


class Automaton(NamedTuple):
    """An n-gram model as an automaton that is deterministic but for its arcs of back-off.

    start: the state after `<s>`; words: an arc for each n-gram but those that end in `<s>` or
    `</s>`; ends: for those that end in `</s>`; backoffs: to the state of a shorter history.
    """

    start: int
    words: list[Arc]
    ends: list[Arc]
    backoffs: list[Arc]


def make_automaton(model: NgramModel) -> Automaton:
    """Make an automaton of the states of a model, by their numbers."""
    made = model.numbered()
    every = _arcs(made.contexts[1:], made.states[1:], made.words[1:], made.log_probs[1:])
    states = 1 + np.flatnonzero(made.states[1:] == np.arange(1, len(made.states)))
    return Automaton(
        model.start,
        [each for each in every if each[2] not in (BEGIN, END)],
        [each for each in every if each[2] == END],
        _arcs(states, made.shorter[states], made.words[states], made.backoffs[states]),
    )


def _arcs(*columns: Int64s | Float32s) -> list[Arc]:
    return list(zip(*(each.tolist() for each in columns), strict=True))
