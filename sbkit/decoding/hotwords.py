"""Words and phrases that are to be expected: a reward for each that is heard.

Phrases are found by the automaton of Aho and Corasick ("Efficient string matching", 1975) in the
letters of a text, between spaces, so that the time does not grow with their number. A phrase earns
one reward, however long it is, and less if it is very short. While it is being spelled, a part of
the reward is lent, by which the beam keeps it, and taken back where it goes on otherwise.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.decoding.word_scorer import SPACE

LONG_ENOUGH = 4  # letters; shorter phrases earn less, because they are heard everywhere
LENT = 0.9  # of the reward, for a phrase of which all but the end is spelled
LARGEST_LIST = 1 << 24  # characters


class _Place:
    """A place of the automaton: what may follow, where to go on else, and what ends here."""

    __slots__ = ("earned", "ends", "fallback", "lent", "letters")

    def __init__(self) -> None:
        self.letters: dict[str, _Place] = {}
        self.fallback: _Place | None = None
        self.ends, self.earned, self.lent = 0, 0.0, 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class HotwordScorer:
    """A reward for every phrase in a text.

    Attributes:
        phrases: normalized, each once.
        pieces: the tokens as they are written, by their ids.
        reward: for each phrase that is heard, in full from ``LONG_ENOUGH`` letters on.
    """

    phrases: Sequence[str]
    pieces: Sequence[str]
    reward: float
    _root: _Place = field(default_factory=_Place, init=False)
    _spaces: set[_Place] = field(default_factory=set, init=False)  # places after a space

    def __post_init__(self) -> None:
        """Build the automaton."""
        for phrase in self.phrases:
            place, spelled = self._root, f" {phrase} "
            reward = self.reward * min(1.0, len(phrase) / LONG_ENOUGH)
            for count, letter in enumerate(spelled, start=1):
                place = place.letters.setdefault(letter, _Place())
                if letter == " ":
                    self._spaces.add(place)
                lent = reward * LENT * (count - 1) / (len(spelled) - 1)
                place.lent = max(place.lent, lent if count < len(spelled) else 0.0)
            place.ends, place.earned = place.ends + 1, place.earned + reward
        waiting = deque([self._root])
        while waiting:
            place = waiting.popleft()
            for letter, child in place.letters.items():
                child.fallback = self._root
                if place.fallback is not None:
                    child.fallback = self._follow(place.fallback, letter)
                child.ends += child.fallback.ends
                child.earned += child.fallback.earned
                waiting.append(child)

    def start(self) -> _Place:
        """Return the state at the begin of a text, which is as good as a space."""
        return self._follow(self._root, " ")

    def step(self, state: _Place, token: int) -> tuple[float, _Place]:
        """Read the letters of a token."""
        total = 0.0
        for letter in self.pieces[token]:
            added, state = self._read(state, " " if letter == SPACE else letter)
            total += added
        return total, state

    def end(self, state: _Place) -> float:
        """End the last word, and take back what is lent."""
        added, state = self._read(state, " ")
        return added - state.lent

    def _read(self, state: _Place, letter: str) -> tuple[float, _Place]:
        if letter == " " and state in self._spaces:  # a space after a space is none
            return 0.0, state
        place = self._follow(state, letter)
        return place.earned + place.lent - state.lent, place

    def _follow(self, place: _Place, letter: str) -> _Place:
        while True:
            found = place.letters.get(letter)
            if found is not None:
                return found
            if place.fallback is None:
                return place
            place = place.fallback

    def count(self, text: str) -> int:
        """Count the phrases in a text."""
        place, found = self.start(), 0
        for letter in f"{text} ":
            place = self._follow(place, letter)
            found += place.ends
        return found


@dataclass(frozen=True)
class Hotwords:
    """Phrases to expect: those that the tokens can spell, and those that they cannot."""

    phrases: tuple[str, ...]
    unspellable: tuple[str, ...]

    @classmethod
    def of(
        cls, texts: Iterable[str], *, normalize: Callable[[str], str], pieces: Sequence[str]
    ) -> "Hotwords":
        """Normalize phrases as transcripts are, and see which can be spelled at all."""
        letters = {letter for piece in pieces for letter in piece} | {" "}
        phrases, unspellable = dict[str, None](), dict[str, None]()
        for text in texts:
            phrase = normalize(text)
            if phrase and letters.issuperset(phrase):
                phrases[phrase] = None
            elif text.strip():
                unspellable[text.strip()] = None
        return cls(tuple(phrases), tuple(unspellable))


def read_hotwords(named: str) -> Iterator[str]:
    """Yield the phrases of a file, one on each line, or of a list with commas.

    Raises:
        SbkitError: the file cannot be read.
    """
    file = Path(named)
    if not file.is_file():
        yield from named.split(",")
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError(
            f"`--hotwords` must be a UTF-8 text with a phrase on each line, or phrases with commas "
            f"between them, but {file} cannot be read ({error}). Save it as UTF-8."
        ) from error
    yield from text[:LARGEST_LIST].splitlines()
