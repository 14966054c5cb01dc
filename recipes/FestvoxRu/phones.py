"""The times of words, from the phone labels of the voice: letters are aligned with phones.

The labels have phones and pauses but no words. Russian is spelled nearly as it is spoken, so an
edit distance between letters and phones finds the phones of each word.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product

from sbkit.base.errors import DataError

PAUSE = "pau"
VOWELS = "a e i o u y aa ee ii oo uu yy ae ay ur"
# The phones that a letter can stand for. Consonants come hard and soft, voiced and unvoiced.
SOUNDS = {letter: frozenset(VOWELS.split()) for letter in "аеиоуыэюя"} | {
    letter: frozenset(phones.split())
    for letters, phones in {
        "бп": "b bb p pp",
        "вф": "v vv f ff",
        "гкх": "g gg k kk h hh v",
        "дт": "d dd t tt c sh",
        "зс": "z zz s ss sh zh sch c",
        "жш": "zh sh",
        "ч": "ch sh sch t",
        "щ": "sch",
        "ц": "c",
        "лр": "l ll r rr",
        "мн": "m mm n nn",
        "й": "j",
    }.items()
    for letter in letters
}
GLIDE_LETTERS = "еюяьъ"  # may start with a glide: "я" is "j aa"
SILENT_LETTERS = "ьъ"
SKIP_COST = 1.0  # of a silent letter, or of another phone of a letter
MISMATCH_COST = 1.8  # of a letter with a phone that it cannot stand for
MAX_COST_PER_PHONE = 0.25  # sentences of the package have 0.07 at most


class Step(Enum):
    """How a path reaches a cell of the table of letters and phones from a neighboring cell."""

    SOUND = auto()  # the letter is spoken as the phone
    SILENCE = auto()  # the letter is silent
    AFTER = auto()  # the phone is another one of the letter before it
    BEFORE = auto()  # the phone is another one of the letter after it


@dataclass(frozen=True)
class Phone:
    """A phone of the labels, or a pause; times are in seconds."""

    name: str
    start: float
    end: float


def read_labels(content: str) -> list[Phone]:
    """Read a label file: after a line with ``#``, each line has an end time, a color and a name."""
    phones: list[Phone] = []
    for line in content.partition("#\n")[2].splitlines():
        match = re.fullmatch(r"\s*(\d+\.\d+)\s+\d+\s+(\w+)\s*", line)
        start = phones[-1].end if phones else 0.0
        if match is None or float(match[1]) < start:
            raise DataError(
                "A line of phone labels should be a rising time, a number and a phone, but is "
                f"{line[:60]!r}. Fetch the package again."
            )
        phones.append(Phone(match[2], start, float(match[1])))
    return phones


def time_words(words: Sequence[str], phones: Sequence[Phone]) -> list[tuple[float, float]]:
    """Return the start and end of each word in seconds.

    Raises:
        DataError: the phones do not match the words.
    """
    spoken = [phone for phone in phones if phone.name != PAUSE]
    letters = "".join(words)
    pairs, cost = _align(letters, [phone.name for phone in spoken])
    word_of = [index for index, word in enumerate(words) for _ in word]
    word_phones: list[list[Phone]] = [[] for _ in words]
    for letter, phone in pairs:
        word_phones[word_of[letter]].append(spoken[phone])
    if cost > MAX_COST_PER_PHONE * len(spoken) or not all(word_phones):
        raise DataError(
            f"The phones of {' '.join(words)[:60]!r} do not match its words: {cost:.1f} edits for "
            f"{len(spoken)} phones. Leave the sentence out."
        )
    return [(phones[0].start, phones[-1].end) for phones in word_phones]


def _align(letters: str, phones: Sequence[str]) -> tuple[list[tuple[int, int]], float]:
    """Return pairs of a letter and a phone of it, in order, and the cost of this alignment."""
    if not letters:  # no phone has a letter
        return [], SKIP_COST * len(phones)
    costs = [[0.0] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    steps = [[Step.SOUND] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    for i, j in product(range(len(letters) + 1), range(len(phones) + 1)):
        options = {Step.SOUND: 0.0} if i == j == 0 else {}
        if i and j:
            fits = phones[j - 1] in SOUNDS.get(letters[i - 1], ())
            options[Step.SOUND] = costs[i - 1][j - 1] + (0.0 if fits else MISMATCH_COST)
            options[Step.AFTER] = costs[i][j - 1] + SKIP_COST
        if i:
            is_silent = letters[i - 1] in SILENT_LETTERS
            options[Step.SILENCE] = costs[i - 1][j] + (0.0 if is_silent else SKIP_COST)
        if j and i < len(letters):
            is_glide = phones[j - 1] == "j" and letters[i] in GLIDE_LETTERS
            options[Step.BEFORE] = costs[i][j - 1] + (0.0 if is_glide else SKIP_COST)
        steps[i][j] = min(options, key=options.__getitem__)
        costs[i][j] = options[steps[i][j]]
    pairs: list[tuple[int, int]] = []
    i, j = len(letters), len(phones)
    while i or j:  # trace the cheapest path back
        step = steps[i][j]
        if step is not Step.SILENCE:
            pairs.append((i if step is Step.BEFORE else i - 1, j - 1))
        i -= step in (Step.SOUND, Step.SILENCE)
        j -= step is not Step.SILENCE
    return pairs[::-1], costs[-1][-1]
