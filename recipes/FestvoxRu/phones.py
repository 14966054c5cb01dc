"""The times of words, from the phone labels of the voice: letters are aligned with phones.

The labels have phones and pauses but no words. Russian is spelled nearly as it is spoken, so an
edit distance between letters and phones finds the phones of each word.

Legend: L letters of all words, P phones without pauses.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
SKIP_COST, MISMATCH_COST = 1.0, 1.8  # of a letter or phone without a partner; of an unlikely pair
MAX_COST_PER_PHONE = 0.25  # sentences of the package have 0.07 at most
# Steps: a letter sounds a phone, or is silent; a further phone of the letter before, or after.
SOUND, SILENCE, AFTER, BEFORE = range(4)


@dataclass(frozen=True)
class Phone:
    """A phone of the labels, or a pause, in seconds."""

    name: str
    start: float
    end: float


def read_labels(content: str) -> list[Phone]:
    """Read a label file: lines of end, color and name after a line with a number sign."""
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
    """Return the start and end of each word in seconds."""
    spoken = [phone for phone in phones if phone.name != PAUSE]
    letters = "".join(words)
    steps, cost = _align(letters, [phone.name for phone in spoken])
    word_of = [index for index, word in enumerate(words) for _ in word]
    word_phones: list[list[Phone]] = [[] for _ in words]
    for letter, phone in _pairs(steps):
        word_phones[word_of[letter]].append(spoken[phone])
    if cost > MAX_COST_PER_PHONE * len(spoken) or not all(word_phones):
        raise DataError(
            f"The phones of {' '.join(words)[:60]!r} do not match its words: {cost:.1f} edits for "
            f"{len(spoken)} phones. Leave the sentence out."
        )
    return [(phones[0].start, phones[-1].end) for phones in word_phones]


def _align(letters: str, phones: Sequence[str]) -> tuple[list[list[int]], float]:
    """Return the last step of the best path to each cell, (L + 1, P + 1), and the total cost."""
    best = [[0.0] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    steps = [[SOUND] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    for i, j in product(range(len(letters) + 1), range(len(phones) + 1)):
        costs = {SOUND: 0.0} if i == j == 0 else {}
        if i and j:
            fits = phones[j - 1] in SOUNDS.get(letters[i - 1], ())
            costs[SOUND] = best[i - 1][j - 1] + (0.0 if fits else MISMATCH_COST)
            costs[AFTER] = best[i][j - 1] + SKIP_COST
        if i:
            is_silent = letters[i - 1] in SILENT_LETTERS
            costs[SILENCE] = best[i - 1][j] + (0.0 if is_silent else SKIP_COST)
        if j and i < len(letters):
            is_glide = phones[j - 1] == "j" and letters[i] in GLIDE_LETTERS
            costs[BEFORE] = best[i][j - 1] + (0.0 if is_glide else SKIP_COST)
        steps[i][j] = min(costs, key=costs.__getitem__)
        best[i][j] = costs[steps[i][j]]
    return steps, best[-1][-1]


def _pairs(steps: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Trace the steps back: pairs of a letter and a phone that it sounds, in order."""
    pairs: list[tuple[int, int]] = []
    i, j = len(steps) - 1, len(steps[0]) - 1
    while i or j:
        step = steps[i][j]
        if step != SILENCE:
            pairs.append((i if step == BEFORE else i - 1, j - 1))
        i -= step in (SOUND, SILENCE)
        j -= step != SILENCE
    return pairs[::-1]
