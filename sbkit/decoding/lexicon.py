"""The words of a language model as a tree of characters."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Self


@dataclass(eq=False, slots=True)
class LexiconNode:
    """A beginning of words.

    children: by character; best: the highest look-ahead value of the words that begin so; word:
    the id of the one that is complete here, None where none is.
    """

    children: dict[str, "LexiconNode"] = field(default_factory=dict)
    best: float = -inf
    word: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A word to be put into a lexicon: its characters, its id, and what it promises early.

    value: a natural log-probability, such as that of the unigram.
    """

    letters: str
    word: int
    value: float


class Lexicon:
    """A tree of words; of two that are spelled alike, the first is kept."""

    def __init__(self, *, entries: Iterable[Entry] = ()) -> None:
        self.root = LexiconNode()
        self._insert_all(entries)

    def extended(self, entries: Iterable[Entry]) -> Self:
        """Return a tree with more words; it shares the nodes on whose path none of them lies.

        So the time is that of the new words, however large the tree is.
        """
        larger = type(self)()
        larger.root = _copy(self.root)
        larger._insert_all(each for each in entries if not self._holds(each.letters))
        return larger

    def _insert_all(self, entries: Iterable[Entry]) -> None:
        """Insert words, and copy the nodes that another tree may own before they change."""
        own = set[int]()
        for entry in entries:
            node = self.root
            for letter in entry.letters:
                node.best = max(node.best, entry.value)
                child = node.children.get(letter)
                if child is None or id(child) not in own:
                    child = node.children[letter] = LexiconNode() if child is None else _copy(child)
                    own.add(id(child))
                node = child
            node.best = max(node.best, entry.value)
            node.word = entry.word if node.word is None else node.word

    def _holds(self, letters: str) -> bool:
        node = self.root
        for letter in letters:
            if letter not in node.children:
                return False
            node = node.children[letter]
        return node.word is not None


def _copy(node: LexiconNode) -> LexiconNode:
    return LexiconNode(dict(node.children), node.best, node.word)
