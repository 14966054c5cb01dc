"""Phrases that the user expects: found in a text, and rewarded while it is spelled.

The automaton is that of Aho and Corasick (1975), so its time does not grow with the list.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sbkit.base.errors import SbkitError
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.hypothesis import Hypothesis
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.decoding.spelling import SPACE, Spelling


@dataclass(frozen=True, slots=True, kw_only=True)
class Spellable:
    """Phrases that the recognizer can emit, and those that it never will."""

    phrases: tuple[str, ...]
    refused: tuple[str, ...]


def spellable(phrases: Iterable[str], spelling: Spelling) -> Spellable:
    """Split phrases by whether the tokenizer has a piece for each of their characters."""
    phrases = tuple(phrases)
    good = tuple(phrase for phrase in phrases if spelling.letters(phrase))
    return Spellable(phrases=good, refused=tuple(each for each in phrases if each not in good))


@dataclass(eq=False, slots=True)
class PhraseNode:
    """A beginning of phrases, `▁` before the first word.

    children: by character; credit: the share of a phrase that is spelled, of the phrase nearest
    to its end; complete: whether a phrase ends here; shorter: the node of the longest suffix that
    begins a phrase, None at the root.
    """

    children: dict[str, "PhraseNode"] = field(default_factory=dict)
    credit: float = 0.0
    complete: bool = False
    shorter: "PhraseNode | None" = None


class PhraseState(NamedTuple):
    """The longest beginning of phrases that ends the text; whether a word is begun."""

    node: PhraseNode
    in_word: bool


class HotwordScorer:
    """Add a reward for each end of a word at which a phrase is complete.

    A phrase earns one reward however long it is, and only from the begin of a word to the end of
    one. While it is spelled it has credit, in proportion to its characters, so that the beam keeps
    it; the credit is taken back where the phrase goes on otherwise.
    Raises SbkitError for a phrase that cannot be spelled, and where there is none.
    """

    def __init__(self, *, phrases: Collection[str], spelling: Spelling, reward: float) -> None:
        refused = spellable(phrases, spelling).refused
        if refused or not phrases:
            came = f'"{refused[0]}" cannot' if refused else "there is none"
            raise SbkitError(
                f"Hotwords must be spelled with the tokenizer's characters, but {came}. "
                "Normalize them as the training text, and leave out what `spellable` refuses."
            )
        self._texts, self._reward = spelling.texts, reward
        self._root = _build([spelling.letters(phrase) for phrase in phrases])
        self._before_word = self._root.children[SPACE]

    def start(self) -> Hashable:
        """Return the state before the first word."""
        return PhraseState(self._before_word, False)

    def step(self, state: PhraseState, token: int) -> tuple[float, Hashable]:
        """Return reward and change of credit of the characters of a token, and the state."""
        total = 0.0
        for letter in self._texts[token]:
            if letter != SPACE or state.in_word:
                score, state = self._spell(state, letter)
                total += score
        return total, state

    def end(self, state: PhraseState) -> float:
        """Return the reward of a phrase that the end completes, less the credit of one begun."""
        score = 0.0
        if state.in_word:
            score, state = self._spell(state, SPACE)
        return score - self._reward * state.node.credit

    def _spell(self, state: PhraseState, letter: str) -> tuple[float, PhraseState]:
        node = state.node
        while letter not in node.children and node.shorter is not None:
            node = node.shorter
        after = node.children.get(letter, self._root)
        share = after.credit - state.node.credit + after.complete
        return self._reward * share, PhraseState(after, letter != SPACE)


def _build(phrases: Sequence[str]) -> PhraseNode:
    root = PhraseNode()
    for phrase in phrases:
        node = root
        for place, letter in enumerate(_between_spaces(phrase)):
            node = node.children.setdefault(letter, PhraseNode())
            if place <= len(phrase):  # without the space that ends it, where the reward is paid
                node.credit = max(node.credit, place / len(phrase))
        node.complete = True
    _link(root)
    return root


def _link(root: PhraseNode) -> None:
    """Link each node to its longest suffix, in order of length."""
    nodes = deque([root])
    while nodes:
        parent = nodes.popleft()
        for letter, child in parent.children.items():
            suffix = parent.shorter
            while suffix is not None and letter not in suffix.children:
                suffix = suffix.shorter
            child.shorter = suffix.children[letter] if suffix else root
            child.complete |= child.shorter.complete
            child.credit = max(child.credit, child.shorter.credit)
            nodes.append(child)


class HotwordDecoder:
    """Decode with hotwords so that phrases that are not heard change nothing.

    unbiased, biased: searches without and with a `HotwordScorer`. The biased answer is taken
    only where it contains a phrase that the unbiased one lacks (k2-fsa/icefall#1948).
    """

    def __init__(
        self,
        *,
        unbiased: PrefixBeamSearch,
        biased: PrefixBeamSearch,
        phrases: Collection[str],
        spelling: Spelling,
    ) -> None:
        self._unbiased, self._biased, self._spelling = unbiased, biased, spelling
        self._letters = {phrase: _between_spaces(spelling.letters(phrase)) for phrase in phrases}

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return one of the two beams of log-probabilities (U, V), the best hypothesis first."""
        plain, biased = self._unbiased.decode(log_probs), self._biased.decode(log_probs)
        if not plain or not biased:
            return plain
        gained = self.find(biased[0].tokens) - self.find(plain[0].tokens)
        return biased if gained else plain

    def find(self, tokens: Sequence[int]) -> frozenset[str]:
        """Return the phrases that a token sequence contains, from word begin to word end."""
        text = _between_spaces(SPACE.join(self._spelling.words(tokens)))
        return frozenset(phrase for phrase, letters in self._letters.items() if letters in text)


def _between_spaces(letters: str) -> str:
    return f"{SPACE}{letters}{SPACE}"
