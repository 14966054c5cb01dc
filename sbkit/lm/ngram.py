"""A back-off n-gram model in sorted arrays, which gives log-probabilities word by word.

Legend: V words, N n-grams of one order. An n-gram of order n is a row of that order's arrays; its
key is (row of its first n - 1 words in order n - 1) * V + (id of its last word). Thus n-grams with
the same context are adjacent, and one binary search per word finds any of them.

A state is the shortest history that predicts as well as all words so far: the number of an n-gram,
counted from 1 through all orders, or NO_HISTORY.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from sbkit.base.arrays import Float32s, Int64s
from sbkit.text.normalization import TextTable, normalize

NO_HISTORY = 0  # a state

UNKNOWN, BEGIN, END = 0, 1, 2  # ids
SPECIAL = ("<unk>", "<s>", "</s>")  # by id
MAX_ORDER = 10


@dataclass(frozen=True, eq=False)
class Grams:
    """The n-grams of one order, sorted by key.

    keys: (N,); log_probs: (N,) natural logarithms; backoffs: (N,) natural logarithms of the weight
    of backing off from this context, 0 for none.
    """

    keys: Int64s
    log_probs: Float32s
    backoffs: Float32s

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, eq=False)
class NgramModel:
    """An n-gram model with back-off, as an ARPA file describes it.

    words: by id, `<unk>`, `<s>`, `</s>`, then the others in the order of their code points;
    grams: by order. The unigrams are all V words, so the row of a unigram is its id.
    table: the text table that normalizes words before they are looked up, if texts keep case or
        punctuation and the model's words do not; None if words are looked up as written.

    >>> from sbkit.lm.kneser_ney import train
    >>> model = train([["call", "me"], ["call", "the", "office"]], order=2).model
    >>> log_prob, state = model.advance(model.start, model.id_of("call"))
    >>> round(log_prob, 2)
    -0.54
    """

    words: tuple[str, ...]
    grams: tuple[Grams, ...]
    table: TextTable | None = None

    def __reduce__(self) -> tuple[type["NgramModel"], tuple[object, ...]]:
        """Pickle the model without its cached tables, for processes that decode."""
        return type(self), (self.words, self.grams, self.table)

    @property
    def order(self) -> int:
        return len(self.grams)

    @cached_property
    def start(self) -> int:
        """The state after `<s>`."""
        return self.advance(NO_HISTORY, BEGIN)[1]

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.normalize(word) in self._ids

    def id_of(self, word: str) -> int:
        """Return the id of a word, or of `<unk>` if it is unknown."""
        return self._ids.get(self.normalize(word), UNKNOWN)

    def normalize(self, text: str) -> str:
        """Write a text as the model knows its words."""
        return text if self.table is None else normalize(text, "", self.table)

    def advance(self, state: int, word: int) -> tuple[float, int]:
        """Return the natural log-probability of a word after a state, and the state after it."""
        words, shorter, states, begins, log_probs, backoffs = self._columns
        total = 0.0
        while state:
            end = begins[state + 1]
            number = bisect_left(words, word, begins[state], end)
            if number < end and words[number] == word:
                return total + log_probs[number], states[number]
            total += backoffs[state]
            state = shorter[state]
        return total + log_probs[1 + word], states[1 + word]

    @cached_property
    def _columns(self) -> tuple[memoryview, ...]:
        """The n-grams of all orders by number, (N + 1,) each; number 0 stands for no n-gram.

        Returns the id of the last word; the state to back off to; the state after all words; where
        the n-grams with this context begin, or would begin, (N + 2,); and log-probability and
        back-off as in `Grams`. A state is an n-gram with successors or a back-off weight.
        """
        size = len(self.words)
        firsts = [0, *np.cumsum([1, *map(len, self.grams)]).tolist()]  # numbers, by order
        orders = zip(self.grams, firsts, strict=False)
        keys = np.concatenate([[0], *(grams.keys + first * size for grams, first in orders)])
        zero = np.zeros(1, np.float32)
        log_probs = np.concatenate([zero, *(grams.log_probs for grams in self.grams)])
        backoffs = np.concatenate([zero, *(grams.backoffs for grams in self.grams)])
        begins = 1 + np.searchsorted(keys[1:], size * np.arange(len(keys) + 1))
        is_state = (backoffs != 0) | (begins[1:] > begins[:-1])
        is_state[firsts[-2] :] = False  # of the highest order
        contexts, words = np.divmod(keys, size)
        shorter, states = np.zeros_like(keys), np.zeros_like(keys)
        for first, end in pairwise(firsts[1:]):
            order = slice(first, end)
            if first > 1:
                suffixes = _longest_grams(
                    keys, shorter, shorter[contexts[order]], words[order], size
                )
                shorter[order] = states[suffixes]
            states[order] = np.where(is_state[order], np.arange(first, end), shorter[order])
        # An item of a memoryview is a Python number, which takes 40 ns; one of an array takes 100.
        integers = (array.astype(np.uint32).data for array in (words, shorter, states, begins))
        return *integers, log_probs.data, backoffs.data

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: n for n, word in enumerate(self.words)}


def _longest_grams(
    keys: Int64s, shorter: Int64s, states: Int64s, words: Int64s, size: int
) -> Int64s:
    """Return the longest n-gram of each word after a state, or after a state to back off to."""
    longest = np.zeros_like(words)
    pending = np.arange(len(words))
    while len(pending):
        targets = states[pending] * size + words[pending]
        numbers = 1 + np.searchsorted(keys[1:], targets)
        exists = keys[np.minimum(numbers, len(keys) - 1)] == targets
        longest[pending[exists]] = numbers[exists]
        pending = pending[~exists]
        states[pending] = shorter[states[pending]]
    return longest
