"""Word and character error rates: counts are added over a split and divided once."""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, astuple, dataclass
from functools import cached_property
from itertools import zip_longest

from rapidfuzz.distance import Levenshtein
from rich.cells import cell_len, set_cell_size

from sbkit.text.word import Word

SPACE = "\N{OPEN BOX}"  # what shows a space where characters are aligned


@dataclass(frozen=True)
class ErrorCounts:
    """The edits that turn references into hypotheses; ``ErrorCounts()`` is the zero of a sum.

    ``total`` counts the words, or the characters, of the references.
    """

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    total: int = 0

    def __add__(self, other: "ErrorCounts") -> "ErrorCounts":
        """Add count by count."""
        return ErrorCounts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def errors(self) -> int:
        """Count all edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Divide errors by the total, as a fraction that exceeds 1 when insertions abound.

        An empty reference divides by one, as jiwer does: 0.0 for an empty hypothesis,
        otherwise the number of insertions; so it is finite, sorts and fits into JSON.
        """
        return self.errors / max(self.total, 1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Error counts of one utterance or of many; ``sum(scores, Scores())`` scores a split."""

    words: ErrorCounts = ErrorCounts()
    characters: ErrorCounts = ErrorCounts()
    utterances: int = 0

    def __add__(self, other: "Scores") -> "Scores":
        """Add the counts of two sets of utterances."""
        return Scores(
            words=self.words + other.words,
            characters=self.characters + other.characters,
            utterances=self.utterances + other.utterances,
        )

    @property
    def wer(self) -> float:
        """Return the word error rate as a fraction."""
        return self.words.rate

    @property
    def cer(self) -> float:
        """Return the character error rate as a fraction."""
        return self.characters.rate


@dataclass(frozen=True)
class ScoredUtterance:
    """One utterance: its reference, its hypothesis and the errors.

    greedy: the result of greedy decoding, where another decoder wrote the hypothesis;
    speaker: "" where it is not known; seconds: of audio, None where they are not known; words: of
    the hypothesis in time, where they were aligned; by_words: false for a language that writes no
    spaces between words: what stands between two is a sentence, and there is no WER.
    """

    id: str
    reference: str
    hypothesis: str
    _: KW_ONLY
    greedy: "ScoredUtterance | None" = None
    speaker: str = ""
    seconds: float | None = None
    words: tuple[Word, ...] = ()
    by_words: bool = True

    @cached_property
    def scores(self) -> "Scores":
        """Count the errors."""
        return count_errors(self.reference, self.hypothesis)

    @property
    def errors(self) -> ErrorCounts:
        """Return the counts that rank it: those of words, or of characters without words."""
        return self.scores.words if self.by_words else self.scores.characters

    @property
    def pairs(self) -> "WordPairs":
        """Pair its words, or its characters, with their counterparts."""
        return pair_units(self.reference, self.hypothesis, by_words=self.by_words)


WordPairs = list[tuple[str, str]]  # of reference and hypothesis, "" where one has no counterpart


def have_words(scored: Iterable[ScoredUtterance]) -> bool:
    """Return whether all utterances are of a language that writes spaces between words."""
    return all(each.by_words for each in scored)


def split_units(text: str, *, by_words: bool) -> list[str]:
    """Return what is aligned: the words of a text or, without words, its characters."""
    return text.split() if by_words else list(SPACE.join(text.split()))


def pair_units(reference: str, hypothesis: str, *, by_words: bool = True) -> WordPairs:
    """Pair each word, or character, with its counterpart, "" where there is none."""
    said, found = (split_units(text, by_words=by_words) for text in (reference, hypothesis))
    pairs: WordPairs = []
    for operation in Levenshtein.opcodes(said, found):
        words = said[operation.src_start : operation.src_end]
        others = found[operation.dest_start : operation.dest_end]
        pairs += zip_longest(words, others, fillvalue="")
    return pairs


def total_scores(scored: Iterable[ScoredUtterance]) -> Scores:
    """Add the scores of a whole split."""
    return sum((utterance.scores for utterance in scored), Scores())


def count_errors(reference: str, hypothesis: str) -> Scores:
    """Count word and character errors of one utterance; either side may be empty.

    Words stand between white space, of which any run counts as one space. Characters are
    code points, spaces among them, as in jiwer: "ab" for "a b" has one deletion in three.
    """
    reference, hypothesis = " ".join(reference.split()), " ".join(hypothesis.split())
    return Scores(
        words=_count_edits(reference.split(), hypothesis.split()),
        characters=_count_edits(reference, hypothesis),
        utterances=1,
    )


def right_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """Return which words of the hypothesis are right, by an alignment with the reference."""
    right = {place for _, place in matching_words(reference, hypothesis)}
    return [place in right for place in range(len(hypothesis))]


def matching_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of the right words, in the reference and in the hypothesis."""
    return [
        (operation.src_start + place, operation.dest_start + place)
        for operation in Levenshtein.opcodes(reference, hypothesis)
        if operation.tag == "equal"
        for place in range(operation.src_end - operation.src_start)
    ]


def align(reference: str, hypothesis: str, *, by_words: bool = True) -> tuple[str, str, str]:
    """Set the words of both in shared columns, ``*`` where one is missing, marked S, D or I.

    Without words, the characters. Returns three lines to print below each other.
    Columns are as wide as a terminal shows them: two cells for a CJK character, none for a
    combining accent.
    """
    columns = []
    for pair in pair_units(reference, hypothesis, by_words=by_words):
        width = max(1, *map(cell_len, pair))
        cells = (*(each or "*" * width for each in pair), mark_pair(*pair))
        columns.append([set_cell_size(each, width) for each in cells])
    between = " " if by_words else ""
    first, second, marks = (
        between.join(column[line] for column in columns).rstrip() for line in range(3)
    )
    return first, second, marks


def _count_edits(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    kinds = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return ErrorCounts(
        substitutions=kinds["replace"],
        deletions=kinds["delete"],
        insertions=kinds["insert"],
        total=len(reference),
    )


def mark_pair(reference: str, hypothesis: str) -> str:
    """Return S, D or I for a word and its counterpart, "" where they are equal."""
    if reference == hypothesis:
        return ""
    return "S" if reference and hypothesis else "D" if reference else "I"
