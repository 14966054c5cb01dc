"""Hotwords: phrases that the user expects, which a decoder rewards while it spells them.

The automaton of Aho and Corasick (1975) finds them in the same time for any number of phrases.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sbkit.base.files import read_text_lines
from sbkit.text.tokenizer import SPACE, Tokenizer

# Rewards in natural logarithms. A longer phrase earns more, because it rarely fits the audio by
# chance; a phrase of a longer list earns less.
PHRASE_REWARD = 2.0
LETTER_REWARD = 1.2
MAX_REWARDED_LETTERS = 10  # of a phrase
FILE_SUFFIXES = (".txt", ".tsv", ".csv", ".json", ".jsonl", ".lst", ".list")  # no phrase has them
# A phrase ends at these characters, and at a period before a space, except after an abbreviation
# such as Dr. or U.S.A.
PHRASE_END = re.compile(
    r"[,;:!?\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+"
    r"|(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z]{2})(?<!\.\w)\.+(?=\s|$)"
)


def read_hotwords(source: str) -> list[str]:
    """Return the phrases of a file, one per line, or of a list split at commas or lines."""
    file = Path(source)
    is_file = source.lower().endswith(FILE_SUFFIXES) or source.startswith(("/", "./", "../", "~/"))
    with suppress(OSError):  # phrases may be longer than the name of a file
        is_file |= file.is_file() or ("/" in source and file.parent.is_dir())
    if is_file and "\n" not in source:
        return read_text_lines(file, subject="`hotwords`")
    return re.split("[,\n]", source)


def split_prompt(prompt: str) -> tuple[str, ...]:
    """Split a prompt at punctuation and line ends.

    >>> split_prompt("Ada Lovelace of the U.S.A., the analytical engine. Dr. Smith: 3.5 mm")
    ('Ada Lovelace of the U.S.A.', 'the analytical engine', 'Dr. Smith', '3.5 mm')
    """
    phrases = [phrase.strip() for phrase in PHRASE_END.split(prompt)]
    return tuple(dict.fromkeys(filter(None, phrases)))


def normalize_hotwords(
    texts: Iterable[str], *, normalize: Callable[[str], str], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Normalize phrases like transcripts; return the phrases that can be spelled, and the rest."""
    texts = [texts] if isinstance(texts, str) else texts
    phrases: dict[str, None] = {}
    refused: dict[str, None] = {}
    for text in texts:
        phrase = normalize(text)
        if phrase and tokenizer.vocabulary.unk not in tokenizer.encode(phrase):
            phrases[phrase] = None
        elif text.strip():
            refused[text.strip()] = None
    return tuple(phrases), tuple(refused)


@dataclass(eq=False, slots=True)
class PhraseNode:
    """A prefix of phrases, with `▁` before the first word.

    Attributes:
        children: by character.
        credit: the part of its reward that a partly spelled phrase has earned; the largest one if
            several phrases share this prefix.
        earned: the largest reward of the phrases that end here.
        shorter: the node of the longest suffix that begins a phrase, None at the root.
    """

    children: dict[str, "PhraseNode"] = field(default_factory=dict)
    credit: float = 0.0
    earned: float = 0.0
    shorter: "PhraseNode | None" = None


class PhraseState(NamedTuple):
    """The longest prefix of phrases at the end of the text, and whether a word is unfinished."""

    node: PhraseNode
    in_word: bool


class HotwordScorer:
    """Add the reward of a phrase when the end of a word completes it.

    A phrase begins and ends with whole words; marks that it lacks count as spaces. If two phrases
    end together, the larger reward counts. A partly spelled phrase has credit in proportion to its
    characters, so that the beam keeps it; the credit is withdrawn if the text goes on differently.
    """

    def __init__(self, *, rewards: Mapping[str, float], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._root = _build({tokenizer.spelling(p): reward for p, reward in rewards.items()})

    def start(self) -> Hashable:
        return PhraseState(self._root.children[SPACE], False)

    def advance(self, state: PhraseState, token: int) -> tuple[float, Hashable]:
        total = 0.0
        for letter in self._tokenizer.texts[token]:
            if letter in self._tokenizer.marks and letter not in state.node.children:
                letter = SPACE
            if letter != SPACE or state.in_word:
                score, state = self._spell(state, letter)
                total += score
        return total, state

    def end(self, state: PhraseState) -> float:
        score = 0.0
        if state.in_word:
            score, state = self._spell(state, SPACE)
        return score - state.node.credit

    def _spell(self, state: PhraseState, letter: str) -> tuple[float, PhraseState]:
        node = state.node
        while letter not in node.children and node.shorter is not None:
            node = node.shorter
        node = node.children.get(letter, self._root)
        score = node.credit - state.node.credit + node.earned
        return score, PhraseState(node, letter != SPACE)


def reward_phrases(phrases: Collection[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the reward of each phrase of a list, by its letters and the length of the list."""
    penalty = math.log(max(1, len(phrases)))
    rewards: dict[str, float] = {}
    for phrase in phrases:
        num_letters = min(MAX_REWARDED_LETTERS, len(tokenizer.spelling(phrase)))
        rewards[phrase] = max(0.0, PHRASE_REWARD + LETTER_REWARD * num_letters - penalty)
    return rewards


def _build(rewards: Mapping[str, float]) -> PhraseNode:
    root = PhraseNode()
    for phrase, reward in rewards.items():
        node = root
        for index, letter in enumerate(f"{SPACE}{phrase}{SPACE}"):
            node = node.children.setdefault(letter, PhraseNode())
            if index <= len(phrase):  # not at the final space, which pays the reward
                node.credit = max(node.credit, reward * index / len(phrase))
        node.earned = max(node.earned, reward)
    _link(root)
    return root


def _link(root: PhraseNode) -> None:
    """Link each node to its longest suffix, shorter prefixes first."""
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
