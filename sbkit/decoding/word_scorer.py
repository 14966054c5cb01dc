"""A language model of words, for a decoder that writes tokens.

A word is spelled letter by letter along a tree of the known words. What the most likely word below
a place of the tree would cost is paid in advance, and settled at the word's end (look-ahead, as in
Ortmanns et al., "Language-model look-ahead for large vocabulary speech recognition", 1996). A word
that leaves the tree is unknown, and pays for it there: later, unknown words would fill the beam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from sbkit.lm.ngram import END, SPECIAL, UNKNOWN, NgramModel, State

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's


class _Node:
    """A place in the tree of words: the letters that may follow, and the word that ends here."""

    __slots__ = ("best", "is_word", "letters", "word")

    def __init__(self) -> None:
        self.letters: dict[str, _Node] = {}
        self.word, self.is_word, self.best = UNKNOWN, False, -inf


class WordState(NamedTuple):
    """Where a hypothesis stands.

    lm: the language model's state; node: the place in the tree, None off it; paid: in advance for
    this word; begun: whether it has a letter.
    """

    lm: State
    node: _Node | None
    paid: float
    begun: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class WordScorer:
    """Scores of words: ``weight`` times their log-probability, plus ``bonus`` for each.

    Attributes:
        model: of words.
        pieces: the tokens as they are written, by their ids; ``▁`` stands for a space.
        weight: of the log-probabilities.
        bonus: for each word, against the liking of language models for few words.
        unknown: more for each word that the model does not know.
        more_words: that the model does not know, and that cost nothing for it.
    """

    model: NgramModel
    pieces: Sequence[str]
    weight: float
    bonus: float
    unknown: float
    more_words: Sequence[str] = ()
    _root: _Node = field(default_factory=_Node, init=False)

    def __post_init__(self) -> None:
        """Plant the tree."""
        for word in range(len(SPECIAL), len(self.model.words)):
            self._add(self.model.words[word], word)
        for text in self.more_words:
            self._add(text, UNKNOWN)

    def _add(self, text: str, word: int) -> None:
        best = self.weight * self.model.score((), word)[0]
        node = self._root
        for letter in text:
            node = node.letters.setdefault(letter, _Node())
            node.best = max(node.best, best)
        node.word, node.is_word = word, True

    def start(self) -> WordState:
        """Return the state before the first word."""
        return WordState(self.model.start, self._root, 0.0, begun=False)

    def step(self, state: WordState, token: int) -> tuple[float, WordState]:
        """Read the letters of a token; a space ends a word."""
        total = 0.0
        for letter in self.pieces[token]:
            added, state = self._end_word(state) if letter == SPACE else self._read(state, letter)
            total += added
        return total, state

    def end(self, state: WordState) -> float:
        """End the last word, and the sentence."""
        added, state = self._end_word(state)
        return added + self.weight * self.model.score(state.lm, END)[0]

    def _read(self, state: WordState, letter: str) -> tuple[float, WordState]:
        if state.node is None:
            return 0.0, state
        node = state.node.letters.get(letter)
        if node is None:
            cost = self._cost_of_unknown(state.lm)
            return cost - state.paid, WordState(state.lm, None, cost, begun=True)
        return node.best - state.paid, WordState(state.lm, node, node.best, begun=True)

    def _cost_of_unknown(self, lm: State) -> float:
        return self.weight * self.model.score(lm, UNKNOWN)[0] + self.unknown

    def _end_word(self, state: WordState) -> tuple[float, WordState]:
        if not state.begun:
            return 0.0, state
        node = state.node
        known = node is not None and node.is_word
        log_prob, lm = self.model.score(state.lm, node.word if node is not None else UNKNOWN)
        cost = self.weight * log_prob + (0.0 if known else self.unknown)
        return cost + self.bonus - state.paid, WordState(lm, self._root, 0.0, begun=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScorer:
    """A language model of the tokens themselves, such as pieces or characters.

    Attributes:
        model: its words are the tokens as they are written.
        pieces: the tokens by their ids.
        weight: of the log-probabilities.
        bonus: for each token.
    """

    model: NgramModel
    pieces: Sequence[str]
    weight: float
    bonus: float
    _words: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Find the tokens among the model's words."""
        self._words.extend(map(self.model.id_of, self.pieces))

    def start(self) -> State:
        """Return the state before the first token."""
        return self.model.start

    def step(self, state: State, token: int) -> tuple[float, State]:
        """Score a token."""
        log_prob, after = self.model.score(state, self._words[token])
        return self.weight * log_prob + self.bonus, after

    def end(self, state: State) -> float:
        """Score the end."""
        return self.weight * self.model.score(state, END)[0]
