"""A word n-gram model over spelled words, with look-ahead and an open vocabulary.

Its words stand in a tree of characters, the lexicon.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import inf

from sbkit.lm.ngram import END, NO_HISTORY, UNKNOWN, NgramModel
from sbkit.text.tokenizer import SPACE, Tokenizer


@dataclass(eq=False, slots=True)
class LexiconNode:
    """A beginning of words; the root is the lexicon.

    children: by character; best: the highest look-ahead value of the words that begin so; word:
    the id of the one that is complete here, None where none is.
    """

    children: dict[str, "LexiconNode"] = field(default_factory=dict)
    best: float = -inf
    word: int | None = None


Entry = tuple[str, int, float]
"""A word's characters, its id, and its look-ahead value: the log-probability of its unigram."""


def extend_lexicon(root: LexiconNode, entries: Iterable[Entry]) -> LexiconNode:
    """Return a tree with more words; of two that are spelled alike, the first is kept.

    It shares the nodes on whose path no new word is, so the time is that of the new words, however
    large the tree is.
    """
    larger, own = _copy(root), set[int]()  # nodes that no other tree has, and that may change
    for letters, word, value in entries:
        node = larger
        for letter in letters:
            node.best = max(node.best, value)
            child = node.children.get(letter)
            if child is None or id(child) not in own:
                child = node.children[letter] = LexiconNode() if child is None else _copy(child)
                own.add(id(child))
            node = child
        node.best = max(node.best, value)
        node.word = word if node.word is None else node.word
    return larger


def _copy(node: LexiconNode) -> LexiconNode:
    return LexiconNode(dict(node.children), node.best, node.word)


def make_lexicon(lm: NgramModel, tokenizer: Tokenizer) -> LexiconNode:
    """Return the words of a language model that the recognizer can spell, as a tree."""
    spelled = ((tokenizer.letters(word), lm.id_of(word)) for word in lm.words[END + 1 :])
    entries = [
        (letters, word, lm.score(NO_HISTORY, word)[0])
        for letters, word in spelled
        if letters and SPACE not in letters
    ]
    return extend_lexicon(LexiconNode(), entries)


WordState = tuple[int, LexiconNode | None]
"""The language model's state, and the node of the word begun: the root between words, None where a
word has left the lexicon, whose price is then paid."""


class WordScorer:
    """Add lm_weight * ln P(words `</s>`) + word_bonus * words + unknown_word_score * unknown words.

    A spelled word pays the best unigram of the words that begin so at once, and the difference to
    its own probability at its end (look-ahead, or smearing, after Ortmanns and Ney, 2000). A
    spelling that leaves the lexicon pays for `<unk>` and unknown_word_score when it leaves, because
    paying at its end would fill the beam with what is no word. Added words, such as hotwords, pay
    for `<unk>` alone.
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
        spelled = (tokenizer.letters(word) for word in added_words)
        added = [(letters, UNKNOWN, value) for letters in spelled if letters]
        self._root = extend_lexicon(lexicon, added)

    def start(self) -> Hashable:
        """Return the state after `<s>`, before a word."""
        return self._lm.start, self._root

    def step(self, state: WordState, token: int) -> tuple[float, Hashable]:
        """Return the score of the characters of a token, and the state after them."""
        total = 0.0
        for letter in self._texts[token]:
            score, state = self._close(state) if letter == SPACE else self._spell(state, letter)
            total += score
        return total, state

    def end(self, state: WordState) -> float:
        """Return the score of the end of the last word and `</s>`."""
        score, (history, _) = self._close(state)
        return score + self._lm_weight * self._lm.score(history, END)[0]

    def _spell(self, state: WordState, letter: str) -> tuple[float, WordState]:
        history, node = state
        if node is None:
            return 0.0, state
        child = node.children.get(letter)
        if child is None:
            return self._leave(history, node)
        return self._promised(child) - self._promised(node), (history, child)

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
        score = self._lm_weight * log_prob + self._word_bonus - self._promised(node)
        return score, (history, self._root)

    def _leave(self, history: int, node: LexiconNode) -> tuple[float, WordState]:
        """Pay for an unknown word, and take back what was paid early."""
        log_prob, history = self._lm.score(history, UNKNOWN)
        price = self._lm_weight * log_prob + self._word_bonus + self._unknown_word_score
        return price - self._promised(node), (history, None)

    def _promised(self, node: LexiconNode) -> float:
        """Return what was paid early for a word begun, nothing between words."""
        if node is self._root:
            return 0.0
        return self._lm_weight * node.best + self._word_bonus
