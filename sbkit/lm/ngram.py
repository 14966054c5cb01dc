"""A back-off n-gram model in sorted arrays, which decoders ask word by word.

Legend: V words, N n-grams of one order. An n-gram of order n is a row of that order's arrays; its
key is (row of its first n - 1 words in order n - 1) * V + (id of its last word). So the n-grams
that share a context stand side by side, and one binary search per word finds any of them.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
State = tuple[int, ...]

UNKNOWN, BEGIN, END = 0, 1, 2  # ids
SPECIAL = ("<unk>", "<s>", "</s>")  # by id
BLANKS = frozenset(" \t\n\r\v\f\0")  # what separates words in a text or an ARPA file
LARGEST_ORDER = 10
REMEMBERED = 1 << 17  # answers, of about 400 bytes each


@dataclass(frozen=True, eq=False)
class Grams:
    """The n-grams of one order, sorted by key.

    keys: (N,); log_probs: (N,) natural logarithms; backoffs: (N,) natural logarithms of the weight
    that a longer n-gram pays where it is not there, 0 where none is.
    """

    keys: Ints
    log_probs: Floats
    backoffs: Floats

    def __len__(self) -> int:
        """Count them."""
        return len(self.keys)


@dataclass(frozen=True, eq=False)
class NgramModel:
    """An n-gram model with back-off, as an ARPA file describes it.

    words: by id, `<unk>`, `<s>`, `</s>`, then the others in the order of their code points;
    grams: by order; the unigrams are all V words, so that the row of one is its id.
    """

    words: tuple[str, ...]
    grams: tuple[Grams, ...]
    _answers: dict[tuple[State, int], tuple[float, State]] = field(
        default_factory=dict, init=False, repr=False
    )
    _rows: dict[State, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[type["NgramModel"], tuple[tuple[str, ...], tuple[Grams, ...]]]:
        """Pickle the model without what it remembers, for processes that decode."""
        return type(self), (self.words, self.grams)

    @property
    def order(self) -> int:
        """Return the number of words in the longest n-grams."""
        return len(self.grams)

    @cached_property
    def start(self) -> State:
        """Return the state after `<s>`."""
        return self._next_state((), BEGIN)

    def __contains__(self, word: object) -> bool:
        """Check whether a word has an id of its own."""
        return word in self._ids

    def id_of(self, word: str) -> int:
        """Return the id of a word, that of `<unk>` where it is unknown."""
        return self._ids.get(word, UNKNOWN)

    def score(self, state: State, word: int) -> tuple[float, State]:
        """Return the natural log-probability of a word after a state, and the state after it.

        The next state is the shortest that says as much about what follows as all the words do:
        two histories with equal states have equal futures. A state has at most order - 1 ids.
        """
        asked = (state, word)
        answer = self._answers.get(asked)
        if answer is None:
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            answer = self._log_prob(state, word), self._next_state(state, word)
            self._answers[asked] = answer
        return answer

    def _log_prob(self, state: State, word: int) -> float:
        paid, length = 0.0, len(state)
        for row in self._suffix_rows(state):
            if row >= 0:
                longer = self._find(length, row, word)
                if longer >= 0:
                    return paid + self._log_probs[length][longer]
                paid += self._backoffs[length - 1][row]
            length -= 1
        return paid + self._log_probs[0][word]

    def _next_state(self, state: State, word: int) -> State:
        """Drop the words from the front that change nothing: no n-gram, no back-off."""
        if self.order == 1:
            return ()
        history = (*state, word)[1 - self.order :]
        length = len(history)
        for row in self._suffix_rows(history):
            if row >= 0 and (self._backoffs[length - 1][row] or self._followed[length - 1][row]):
                return history[-length:]
            length -= 1
        return ()

    def _suffix_rows(self, history: State) -> tuple[int, ...]:
        """Return the rows of the suffixes of a history, the longest first, -1 for no n-gram."""
        found = self._rows.get(history)
        if found is None:
            if len(self._rows) >= REMEMBERED:
                self._rows.clear()
            found = self._search(history) if history else ()
            self._rows[history] = found
        return found

    def _search(self, history: State) -> tuple[int, ...]:
        word, lengths = history[-1], range(len(history) - 1, 0, -1)
        shorter = zip(lengths, self._suffix_rows(history[:-1]), strict=True)
        rows = [-1 if row < 0 else self._find(length, row, word) for length, row in shorter]
        return (*rows, word)

    def _find(self, length: int, row: int, word: int) -> int:
        """Return the row of a context of so many words and one more, -1 where it is not there."""
        keys, key = self._keys[length], row * len(self.words) + word
        place = bisect_left(keys, key)
        return place if place < len(keys) and keys[place] == key else -1

    # `data` gives Python's own numbers, in 40 ns instead of 100.
    @cached_property
    def _keys(self) -> tuple[memoryview, ...]:
        return tuple(each.keys.data for each in self.grams)

    @cached_property
    def _log_probs(self) -> tuple[memoryview, ...]:
        return tuple(each.log_probs.data for each in self.grams)

    @cached_property
    def _backoffs(self) -> tuple[memoryview, ...]:
        return tuple(each.backoffs.data for each in self.grams)

    @cached_property
    def _followed(self) -> tuple[memoryview, ...]:
        """Mark each n-gram, below the highest order, with which a longer one begins."""
        marks = []
        for lower, higher in zip(self.grams, self.grams[1:], strict=False):
            mark = np.zeros(len(lower), np.uint8)
            mark[higher.keys // len(self.words)] = 1
            marks.append(mark.data)
        return tuple(marks)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}
