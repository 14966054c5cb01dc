"""A back-off n-gram model in sorted arrays, which gives log-probabilities word by word.

Legend: V words, N n-grams of one order. An n-gram of order n is a row of that order's arrays; its
key is (row of its first n - 1 words in order n - 1) * V + (id of its last word). Thus n-grams with
the same context are adjacent, and one binary search per word finds any of them.

A state is the shortest history that predicts as well as all words so far: the rows of the last
word, the last two words, ... in their orders; MISSING where the model lacks such an n-gram.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from sbkit.base.arrays import Float32s, Int64s
from sbkit.text.normalization import TextTable, normalize

NgramState = tuple[int, ...]
NO_HISTORY: NgramState = ()
MISSING = -1  # in a state

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
        """Pickle the model without its views of the arrays, for processes that decode."""
        return type(self), (self.words, self.grams, self.table)

    @property
    def order(self) -> int:
        return len(self.grams)

    @cached_property
    def start(self) -> NgramState:
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

    def advance(self, state: NgramState, word: int) -> tuple[float, NgramState]:
        """Return the natural log-probability of a word after a state, and the state after it."""
        unigrams, orders, is_state = self._columns
        size = len(self.words)
        log_prob = unigrams[word]
        rows = [word]
        for context, (backoffs, keys, log_probs) in zip(state, orders, strict=False):
            row = MISSING
            if context != MISSING:
                key = context * size + word
                row = bisect_left(keys, key)
                if row < len(keys) and keys[row] == key:
                    log_prob = log_probs[row]
                else:
                    row = MISSING
                    log_prob += backoffs[context]
            rows.append(row)
        del rows[self.order - 1 :]
        while rows and (rows[-1] == MISSING or not is_state[len(rows) - 1][rows[-1]]):
            rows.pop()
        return log_prob, tuple(rows)

    @cached_property
    def _columns(self) -> tuple[memoryview, list[tuple[memoryview, ...]], list[memoryview]]:
        """Views of the arrays: an item of a memoryview takes 40 ns, one of an array takes 100.

        Returns the log-probabilities of unigrams; by order of contexts, their back-offs, and keys
        and log-probabilities of n-grams after them; whether contexts have either, and are states.
        """
        orders = list[tuple[memoryview, ...]]()
        is_state = list[memoryview]()
        for contexts, grams in pairwise(self.grams):
            has_effect = contexts.backoffs != 0
            has_effect[grams.keys // len(self.words)] = True
            orders.append((contexts.backoffs.data, grams.keys.data, grams.log_probs.data))
            is_state.append(has_effect.data)
        return self.grams[0].log_probs.data, orders, is_state

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: n for n, word in enumerate(self.words)}
