"""Scorers add to the CTC score of a token sequence, token by token: language models, hotwords.

A scorer is a deterministic weighted automaton over tokens. A beam search needs the same arcs
repeatedly, so `LazyAutomaton` caches them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, Protocol

from sbkit.lm.ngram import END, NO_HISTORY, UNKNOWN, NgramModel
from sbkit.text.tokenizer import SPACE, Tokenizer

MAX_CACHED_STATES = 1 << 17  # of 1 to 4 kB each with their arcs; with fewer, decoding is slower


class PrefixScorer(Protocol):
    """A score of token sequences; equal states have equal futures."""

    def start(self) -> Hashable:
        """Return the state of the empty sequence."""

    def step(self, state: Any, token: int) -> tuple[float, Hashable]:
        """Return the score of a token after a state, and the state after it."""

    def end(self, state: Any) -> float:
        """Return the score of the end of the audio."""


class SumOfScorers:
    """Add the scores of several scorers."""

    def __init__(self, *, scorers: Sequence[PrefixScorer]) -> None:
        self._scorers = tuple(scorers)

    def start(self) -> Hashable:
        return tuple(scorer.start() for scorer in self._scorers)

    def step(self, state: Sequence[Any], token: int) -> tuple[float, Hashable]:
        total = 0.0
        next_states: list[Hashable] = []
        for scorer, scorer_state in zip(self._scorers, state, strict=True):
            score, next_state = scorer.step(scorer_state, token)
            total += score
            next_states.append(next_state)
        return total, tuple(next_states)

    def end(self, state: Sequence[Any]) -> float:
        return sum(scorer.end(s) for scorer, s in zip(self._scorers, state, strict=True))


NO_SCORERS = SumOfScorers(scorers=())


Arc = tuple[float, Hashable]
"""The score of a token, and the scorer's state after it."""


@dataclass(eq=False, slots=True)
class AutomatonState:
    """A scorer's state, and its computed arcs by token."""

    scorer_state: Hashable
    arcs: dict[int, Arc] = field(default_factory=dict)


class LazyAutomaton:
    """The states and arcs of a scorer, each computed when it is first needed.

    A dictionary lookup by token replaces a call, and a state is hashed only when a prefix enters
    the beam.
    """

    def __init__(self, scorer: PrefixScorer) -> None:
        self._scorer = scorer
        self._states: dict[Hashable, AutomatonState] = {}

    def limit(self) -> None:
        """Drop all states if there are too many; a search calls this before it begins."""
        if len(self._states) > MAX_CACHED_STATES:
            self._states = {}

    def start(self) -> AutomatonState:
        return self.state(self._scorer.start())

    def state(self, scorer_state: Hashable) -> AutomatonState:
        """Return the automaton's unique state for a state of the scorer."""
        state = self._states.get(scorer_state)
        if state is None:
            state = self._states[scorer_state] = AutomatonState(scorer_state)
        return state

    def expand(self, state: AutomatonState, token: int) -> Arc:
        """Compute and cache an arc."""
        arc = state.arcs[token] = self._scorer.step(state.scorer_state, token)
        return arc

    def end(self, scorer_state: Hashable) -> float:
        return self._scorer.end(scorer_state)


class TokenScorer:
    """Add lm_weight * ln P(tokens `</s>`) + token_bonus * (number of tokens).

    lm: a model whose words are pieces of the tokenizer, `▁` included; pieces: by token id.
    """

    def __init__(
        self,
        *,
        lm: NgramModel,
        pieces: Sequence[str],
        lm_weight: float = 0.5,
        token_bonus: float = 0.0,
    ) -> None:
        self._lm, self._lm_weight, self._token_bonus = lm, lm_weight, token_bonus
        self._ids = [lm.id_of(piece) for piece in pieces]

    def start(self) -> Hashable:
        return self._lm.start

    def step(self, state: int, token: int) -> tuple[float, Hashable]:
        log_prob, after = self._lm.score(state, self._ids[token])
        return self._lm_weight * log_prob + self._token_bonus, after

    def end(self, state: int) -> float:
        return self._lm_weight * self._lm.score(state, END)[0]


# ---- a model of words, with a lexicon: the words as a tree of characters


@dataclass(eq=False, slots=True)
class LexiconNode:
    """A prefix of words; the root is the lexicon.

    children: by character; best: the highest look-ahead value of the words with this prefix; word:
    the id of the word that is complete here, None if there is none.
    """

    children: dict[str, "LexiconNode"] = field(default_factory=dict)
    best: float = -inf
    word: int | None = None


Entry = tuple[str, int, float]
"""A word's characters, its id, and its look-ahead value: the log-probability of its unigram."""


def extend_lexicon(root: LexiconNode, entries: Iterable[Entry]) -> LexiconNode:
    """Return a tree with more words; of two words with one spelling, the first is kept.

    The trees share all nodes that are on no new word's path, so the time depends only on the new
    words, however large the tree is.
    """
    new_root = _copy(root)
    own: set[int] = set()  # ids of nodes that no other tree has, so that they may be changed
    for letters, word, value in entries:
        node = new_root
        for letter in letters:
            node.best = max(node.best, value)
            child = node.children.get(letter)
            if child is None or id(child) not in own:
                child = node.children[letter] = LexiconNode() if child is None else _copy(child)
                own.add(id(child))
            node = child
        node.best = max(node.best, value)
        node.word = word if node.word is None else node.word
    return new_root


def _copy(node: LexiconNode) -> LexiconNode:
    return LexiconNode(dict(node.children), node.best, node.word)


@lru_cache(maxsize=2)  # shared by decoders that differ in their weights
def make_lexicon(lm: NgramModel, tokenizer: Tokenizer) -> LexiconNode:
    """Return the words of a language model that the recognizer can spell, as a tree."""
    spellings = ((tokenizer.letters(word), lm.id_of(word)) for word in lm.words[END + 1 :])
    entries = [
        (letters, word, lm.score(NO_HISTORY, word)[0])
        for letters, word in spellings
        if letters and SPACE not in letters
    ]
    return extend_lexicon(LexiconNode(), entries)


WordState = tuple[int, LexiconNode | None]
"""The language model's state, and the lexicon node of the current word: the root between words,
None once a word has left the lexicon and the price of an unknown word is paid."""


class WordScorer:
    """Add lm_weight * ln P(words `</s>`) + word_bonus * words + unknown_word_score * unknown words.

    A partly spelled word pays the best unigram of the words with that prefix at once, and the
    difference to its own probability at its end (look-ahead, or smearing, after Ortmanns and Ney,
    2000). A spelling that leaves the lexicon pays for `<unk>` and unknown_word_score when it
    leaves, because paying at its end would fill the beam with nonwords. Added words, such as
    hotwords, pay only for `<unk>`.
    """

    def __init__(
        self,
        *,
        lm: NgramModel,
        lexicon: LexiconNode,
        tokenizer: Tokenizer,
        lm_weight: float = 1.0,
        word_bonus: float = 0.0,
        unknown_word_score: float = -12.0,
        added_words: Iterable[str] = (),
    ) -> None:
        self._lm, self._texts = lm, tokenizer.texts
        self._lm_weight, self._word_bonus = lm_weight, word_bonus
        self._unknown_word_score = unknown_word_score
        value = lm.score(NO_HISTORY, UNKNOWN)[0]
        spellings = (tokenizer.letters(word) for word in added_words)
        entries = [(letters, UNKNOWN, value) for letters in spellings if letters]
        self._root = extend_lexicon(lexicon, entries)

    def start(self) -> Hashable:
        return self._lm.start, self._root

    def step(self, state: WordState, token: int) -> tuple[float, Hashable]:
        total = 0.0
        for letter in self._texts[token]:
            score, state = self._close(state) if letter == SPACE else self._spell(state, letter)
            total += score
        return total, state

    def end(self, state: WordState) -> float:
        score, (history, _) = self._close(state)
        return score + self._lm_weight * self._lm.score(history, END)[0]

    def _spell(self, state: WordState, letter: str) -> tuple[float, WordState]:
        history, node = state
        if node is None:
            return 0.0, state
        child = node.children.get(letter)
        if child is None:
            return self._leave(history, node)
        return self._lookahead(child) - self._lookahead(node), (history, child)

    def _close(self, state: WordState) -> tuple[float, WordState]:
        """End a word; between words, another space changes nothing."""
        history, node = state
        if node is self._root:
            return 0.0, state
        score = 0.0
        if node is None or node.word is None:
            if node is not None:
                score, (history, _) = self._leave(history, node)
            return score, (history, self._root)
        log_prob, history = self._lm.score(history, node.word)
        score = self._lm_weight * log_prob + self._word_bonus - self._lookahead(node)
        return score, (history, self._root)

    def _leave(self, history: int, node: LexiconNode) -> tuple[float, WordState]:
        """Pay for an unknown word, and take back the look-ahead payment."""
        log_prob, history = self._lm.score(history, UNKNOWN)
        price = self._lm_weight * log_prob + self._word_bonus + self._unknown_word_score
        return price - self._lookahead(node), (history, None)

    def _lookahead(self, node: LexiconNode) -> float:
        """Return the look-ahead payment for a partly spelled word, nothing between words."""
        if node is self._root:
            return 0.0
        return self._lm_weight * node.best + self._word_bonus
