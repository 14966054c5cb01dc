"""Hotwords: phrases that the user expects, which a search rewards while it spells them.

The automaton is that of Aho and Corasick (1975), so its time does not grow with the list.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sbkit.base.files import read_text
from sbkit.decoding.frames import Hypothesis
from sbkit.text.tokenizer import SPACE, Tokenizer

# How much likelier a phrase is than other text, as natural logarithms: more for a longer phrase,
# which seldom fits the audio by chance, and less for one of a longer list.
REWARD = 2.0
REWARD_OF_LETTER = 1.2
LETTERS = 10  # of a phrase that are rewarded at most
LARGEST_LIST = 1 << 24  # bytes
SUFFIXES = (".txt", ".tsv", ".csv", ".lst", ".list")  # of no phrase


def read_hotwords(named: str) -> list[str]:
    """Return the phrases of a file, one on each line, or of a list with commas.

    Raises SbkitError where the file is not there or cannot be read. A folder's name may be a word.
    """
    if "," not in named and (Path(named).is_file() or named.endswith(SUFFIXES)):
        return read_text(Path(named), max_bytes=LARGEST_LIST, subject="`--hotwords`")
    return named.split(",")


def normalize_hotwords(
    texts: Iterable[str], *, normalize: Callable[[str], str], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Normalize phrases as transcripts, and return them and, unchanged, those without tokens."""
    phrases, refused = dict[str, None](), dict[str, None]()
    for text in texts:
        phrase = normalize(text)
        if phrase and tokenizer.vocabulary.unk not in tokenizer.encode(phrase):
            phrases[phrase] = None
        elif text.strip():
            refused[text.strip()] = None
    return tuple(phrases), tuple(refused)


@dataclass(eq=False, slots=True)
class PhraseNode:
    """A beginning of phrases, `▁` before the first word.

    children: by character; credit: the part of its reward that a phrase begun has, of the phrase
    with most; earned: the reward of the phrases that end here, the largest of them; shorter: the
    node of the longest suffix that begins a phrase, None at the root.
    """

    children: dict[str, "PhraseNode"] = field(default_factory=dict)
    credit: float = 0.0
    earned: float = 0.0
    shorter: "PhraseNode | None" = None


class PhraseState(NamedTuple):
    """The longest beginning of phrases that ends the text; whether a word is begun."""

    node: PhraseNode
    in_word: bool


class HotwordScorer:
    """Add the reward of a phrase at each end of a word at which it is complete.

    A phrase counts only from the begin of a word to the end of one. Where two end together, the
    larger reward counts. While a phrase is spelled it has credit, in proportion to its characters,
    so that the beam keeps it; the credit is taken back where the text goes on otherwise.
    """

    def __init__(self, *, rewards: Mapping[str, float], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._letters = {phrase: tokenizer.letters(phrase) for phrase in rewards}
        self._root = _build({self._letters[phrase]: each for phrase, each in rewards.items()})
        self._before_word = self._root.children[SPACE]

    def start(self) -> Hashable:
        """Return the state before the first word."""
        return PhraseState(self._before_word, False)

    def step(self, state: PhraseState, token: int) -> tuple[float, Hashable]:
        """Return reward and change of credit of the characters of a token, and the state."""
        total = 0.0
        for letter in self._tokenizer.texts[token]:
            if letter != SPACE or state.in_word:
                score, state = self._spell(state, letter)
                total += score
        return total, state

    def end(self, state: PhraseState) -> float:
        """Return the reward of a phrase that the end completes, less the credit of one begun."""
        score = 0.0
        if state.in_word:
            score, state = self._spell(state, SPACE)
        return score - state.node.credit

    def find(self, tokens: Sequence[int]) -> frozenset[str]:
        """Return the phrases that a token sequence contains, from word begin to word end."""
        text = _between_spaces(SPACE.join(self._tokenizer.words(tokens)))
        pairs = self._letters.items()
        return frozenset(phrase for phrase, each in pairs if _between_spaces(each) in text)

    def choose(self, unbiased: list[Hypothesis], biased: list[Hypothesis]) -> list[Hypothesis]:
        """Return one of two beams, of searches without and with the hotwords among their scorers.

        The biased beam is taken only where its best text has a phrase that the unbiased one lacks
        (k2-fsa/icefall#1948).
        """
        gained = self.find(biased[0].tokens) - self.find(unbiased[0].tokens)
        return biased if gained else unbiased

    def _spell(self, state: PhraseState, letter: str) -> tuple[float, PhraseState]:
        node = state.node
        while letter not in node.children and node.shorter is not None:
            node = node.shorter
        after = node.children.get(letter, self._root)
        score = after.credit - state.node.credit + after.earned
        return score, PhraseState(after, letter != SPACE)


def reward_phrases(phrases: Collection[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the reward of each phrase of a list, by its letters and the length of the list."""
    share = math.log(max(1, len(phrases)))
    letters = {phrase: min(LETTERS, len(tokenizer.letters(phrase))) for phrase in phrases}
    return {
        phrase: max(0.0, REWARD + REWARD_OF_LETTER * count - share)
        for phrase, count in letters.items()
    }


def _build(rewards: Mapping[str, float]) -> PhraseNode:
    root = PhraseNode()
    for phrase, reward in rewards.items():
        node = root
        for place, letter in enumerate(_between_spaces(phrase)):
            node = node.children.setdefault(letter, PhraseNode())
            if place <= len(phrase):  # without the space that ends it, where the reward is paid
                node.credit = max(node.credit, reward * place / len(phrase))
        node.earned = max(node.earned, reward)
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
            child.earned = max(child.earned, child.shorter.earned)
            child.credit = max(child.credit, child.shorter.credit)
            nodes.append(child)


def _between_spaces(letters: str) -> str:
    return f"{SPACE}{letters}{SPACE}"
