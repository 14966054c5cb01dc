"""When words are said, by the phone labels of the voice: letters are aligned with phones.

The labels have phones and pauses and no words. Russian is spelled nearly as it is spoken, so that
an edit distance between letters and phones finds which phones a word has.

Legend: L letters of all words, P phones without pauses.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sbkit.base.errors import SbkitError

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
GLIDED = "еюяьъ"  # these may sound a glide before what follows: "я" is "j aa"
SILENT = "ьъ"
SKIP, MISMATCH = 1.0, 1.8  # the costs of a letter or phone alone, and of two that do not fit
MOST = 0.25  # of the costs, for each phone; those of the package have 0.07 at most
# The steps: a letter sounds a phone, or is silent; a phone more for the letter before, or after.
SOUND, SILENCE, AFTER, BEFORE = range(4)


@dataclass(frozen=True)
class Phone:
    """A phone of the labels, or a pause, in seconds."""

    name: str
    start: float
    end: float


def read_labels(content: str) -> list[Phone]:
    """Read a label file: lines of end, color and name after a line with a number sign.

    Raises:
        SbkitError: a line is something else, or a phone ends before it begins.
    """
    phones: list[Phone] = []
    for line in content.partition("#\n")[2].splitlines():
        matched = re.fullmatch(r"\s*(\d+\.\d+)\s+\d+\s+(\w+)\s*", line)
        start = phones[-1].end if phones else 0.0
        if matched is None or float(matched[1]) < start:
            raise SbkitError(
                "A line of phone labels must be a rising time, a number and a phone, but is "
                f"{line[:60]!r}. Fetch the package again."
            )
        phones.append(Phone(matched[2], start, float(matched[1])))
    return phones


def time_words(words: Sequence[str], phones: Sequence[Phone]) -> list[tuple[float, float]]:
    """Return start and end of each word in seconds.

    Raises:
        SbkitError: the phones are not those of the words.
    """
    spoken = [phone for phone in phones if phone.name != PAUSE]
    letters = "".join(words)
    steps, cost = _align(letters, [phone.name for phone in spoken])
    owners = [place for place, word in enumerate(words) for _ in word]
    said: list[list[Phone]] = [[] for _ in words]
    for letter, phone in _pairs(steps):
        said[owners[letter]].append(spoken[phone])
    if cost > MOST * len(spoken) or not all(said):
        raise SbkitError(
            f"The phones of a sentence must be those of its words, but {' '.join(words)[:60]!r} "
            f"needs {cost:.1f} edits for {len(spoken)} phones. Leave it out."
        )
    return [(each[0].start, each[-1].end) for each in said]


def _align(letters: str, phones: Sequence[str]) -> tuple[list[list[int]], float]:
    """Return the last step of the best way to each place, (L + 1, P + 1), and the cost of all."""
    best = [[0.0] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    steps = [[SOUND] * (len(phones) + 1) for _ in range(len(letters) + 1)]
    for i, j in product(range(len(letters) + 1), range(len(phones) + 1)):
        ways = {SOUND: 0.0} if i == j == 0 else {}
        if i and j:
            fits = phones[j - 1] in SOUNDS.get(letters[i - 1], ())
            ways[SOUND] = best[i - 1][j - 1] + (0.0 if fits else MISMATCH)
            ways[AFTER] = best[i][j - 1] + SKIP
        if i:
            ways[SILENCE] = best[i - 1][j] + (0.0 if letters[i - 1] in SILENT else SKIP)
        if j and i < len(letters):
            glide = phones[j - 1] == "j" and letters[i] in GLIDED
            ways[BEFORE] = best[i][j - 1] + (0.0 if glide else SKIP)
        steps[i][j] = min(ways, key=ways.__getitem__)
        best[i][j] = ways[steps[i][j]]
    return steps, best[-1][-1]


def _pairs(steps: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Follow the steps back: pairs of a letter and a phone that it sounds, in order."""
    pairs: list[tuple[int, int]] = []
    i, j = len(steps) - 1, len(steps[0]) - 1
    while i or j:
        step = steps[i][j]
        if step != SILENCE:
            pairs.append((i if step == BEFORE else i - 1, j - 1))
        i -= step in (SOUND, SILENCE)
        j -= step != SILENCE
    return pairs[::-1]
