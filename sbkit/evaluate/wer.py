"""Word and character error rates: counts are added over a split and divided once."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein
from rich.cells import cell_len

from sbkit.text.word import Word

SPACE = "\N{OPEN BOX}"  # what shows a space where characters are aligned


@dataclass(frozen=True, kw_only=True)
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
        return ErrorCounts(
            substitutions=self.substitutions + other.substitutions,
            deletions=self.deletions + other.deletions,
            insertions=self.insertions + other.insertions,
            total=self.total + other.total,
        )

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


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One utterance: its reference, its hypothesis and the errors.

    greedy: the result of greedy decoding, where another decoder wrote the hypothesis;
    speaker: "" where it is not known; seconds: of audio, None where they are not known; words: of
    the hypothesis in time, where they were aligned; by_words: false for a language that writes no
    spaces between words: what stands between two is a sentence, and there is no WER.
    """

    id: str
    reference: str
    hypothesis: str
    scores: Scores
    greedy: "Scored | None" = None
    speaker: str = ""
    seconds: float | None = None
    words: tuple[Word, ...] = ()
    by_words: bool = True

    @property
    def errors(self) -> ErrorCounts:
        """Return the counts that rank it: those of words, or of characters without words."""
        return self.scores.words if self.by_words else self.scores.characters

    @property
    def pairs(self) -> "WordPairs":
        """Pair its words, or its characters, with their counterparts."""
        return _pair_units(self.reference, self.hypothesis, by_words=self.by_words)


class Alignment(NamedTuple):
    """Three lines to print below each other in a fixed-width font."""

    reference: str
    hypothesis: str
    marks: str


WordPairs = list[tuple[str, str]]  # of reference and hypothesis, "" where one has no counterpart


def score(
    id: str,
    reference: str,
    hypothesis: str,
    *,
    speaker: str = "",
    seconds: float | None = None,
    words: tuple[Word, ...] = (),
    by_words: bool = True,
) -> Scored:
    """Score one utterance."""
    return Scored(
        id=id,
        reference=reference,
        hypothesis=hypothesis,
        scores=count_errors(reference, hypothesis),
        speaker=speaker,
        seconds=seconds,
        words=words,
        by_words=by_words,
    )


def have_words(scored: Iterable[Scored]) -> bool:
    """Return whether all utterances are of a language that writes spaces between words."""
    return all(each.by_words for each in scored)


def split_units(text: str, *, by_words: bool) -> list[str]:
    """Return what is aligned: the words of a text or, without words, its characters."""
    return text.split() if by_words else list(SPACE.join(text.split()))


def _pair_units(reference: str, hypothesis: str, *, by_words: bool) -> "WordPairs":
    both = (split_units(text, by_words=by_words) for text in (reference, hypothesis))
    return pair_words(*both)


def total_scores(scored: Iterable[Scored]) -> Scores:
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


def align(reference: str, hypothesis: str, *, by_words: bool = True) -> Alignment:
    """Set the words of both in shared columns, ``*`` where one is missing, marked S, D or I.

    Without words, the characters.

    Columns are as wide as a terminal shows them: two cells for a CJK character, none for a
    combining accent.
    """
    columns = [_column(*pair) for pair in _pair_units(reference, hypothesis, by_words=by_words)]
    lines = zip(*columns, strict=True) if columns else iter([(), (), ()])
    between = " " if by_words else ""
    return Alignment(*(between.join(line).rstrip() for line in lines))


def _count_edits(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    kinds = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return ErrorCounts(
        substitutions=kinds["replace"],
        deletions=kinds["delete"],
        insertions=kinds["insert"],
        total=len(reference),
    )


def pair_words(reference: Sequence[str], hypothesis: Sequence[str]) -> WordPairs:
    """Pair each word with its counterpart, "" where there is none."""
    pairs: WordPairs = []
    for operation in Levenshtein.opcodes(reference, hypothesis):
        words = reference[operation.src_start : operation.src_end]
        others = hypothesis[operation.dest_start : operation.dest_end]
        pairs += zip_longest(words, others, fillvalue="")
    return pairs


def _column(reference: str, hypothesis: str) -> tuple[str, str, str]:
    width = max(cell_len(reference), cell_len(hypothesis), 1)
    cells = (reference or "*" * width, hypothesis or "*" * width, mark_pair(reference, hypothesis))
    return (_pad(cells[0], width), _pad(cells[1], width), _pad(cells[2], width))


def mark_pair(reference: str, hypothesis: str) -> str:
    """Return S, D or I for a word and its counterpart, "" where they are equal."""
    if reference == hypothesis:
        return ""
    return "S" if reference and hypothesis else "D" if reference else "I"


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))
