"""Word and character error rates: counts are added over a split and divided once."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from rapidfuzz.distance import Levenshtein
from rich.cells import cell_len

from sbkit.logs.metric import ratio
from sbkit.text.recognized_word import Word

FigureDict = dict[str, Any]  # rates, counts and intervals by name, for JSON
BLANK_FRAMES, TOKENS_WRITTEN = "blank_frames", "tokens_written"  # metrics of a validation
SHOWN_SPACE = "\N{OPEN BOX}"  # stands for a space when characters are aligned


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """The edits that turn references into hypotheses, in words or in characters.

    Counts can be added, and ``ErrorCounts()`` counts nothing.
    """

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    reference_length: int = 0

    def __add__(self, other: "ErrorCounts") -> "ErrorCounts":
        names = (field.name for field in fields(self))
        return ErrorCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __str__(self) -> str:
        return f"{self.errors} / {self.reference_length}"

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Return the errors per word or character of the references, NaN without any."""
        return ratio(self.errors, self.reference_length)

    def by_kind(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("substitutions", "deletions", "insertions")}


class ErrorRate(NamedTuple):
    """A rate of errors in texts; units: the field of TextErrors that counts them.

    Figures have the number of `units`, and the errors by kind under `error_key`.
    """

    units: str
    needs_spaces: bool = False  # whether only languages with spaces between words have this rate

    @property
    def error_key(self) -> str:
        return f"{self.units.removesuffix('s')}_errors"


ERROR_RATES = {  # in this order in tables; an entry is in all figures, intervals and reports
    "WER": ErrorRate("words", needs_spaces=True),
    "CER": ErrorRate("characters"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextErrors:
    """The error counts of one text or more, with the `units` of each rate.

    >>> errors = count_errors("call the north office", "call the nor office")
    >>> errors.words.errors, errors.wer, errors.characters.errors
    (1, 0.25, 2)
    """

    words: ErrorCounts = ErrorCounts()
    characters: ErrorCounts = ErrorCounts()
    utterances: int = 0

    def __add__(self, other: "TextErrors") -> "TextErrors":
        names = (field.name for field in fields(self))
        return TextErrors(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def wer(self) -> float:
        return self.words.rate

    @property
    def cer(self) -> float:
        return self.characters.rate

    def counts_by_rate(self, *, by_words: bool) -> dict[str, ErrorCounts]:
        """Return the counts of each rate; rates of words only if ``by_words``."""
        names = [name for name, rate in ERROR_RATES.items() if by_words or not rate.needs_spaces]
        return {name: getattr(self, ERROR_RATES[name].units) for name in names}

    def rates(self, *, by_words: bool) -> dict[str, float]:
        return {name: c.rate for name, c in self.counts_by_rate(by_words=by_words).items()}


class GreedyCounts(NamedTuple):
    """Frames and tokens of greedy CTC decoding."""

    frames: int
    blanks: int  # frames whose best token is the blank
    written: int  # tokens
    expected: int  # tokens of the transcript


@dataclass(frozen=True)
class ScoredUtterance:
    """An utterance with its reference and its hypothesis.

    greedy: the result of greedy decoding, if the hypothesis is from another decoder.
    speaker, normalizer: "" if unknown; the normalizer has a name and a hash.
    words: the timed words of the hypothesis, if they were aligned.
    by_words: False for a language without spaces between words, which has no WER.
    counts_of_greedy: known in a validation.
    normalized: the same utterance, with its texts from another normalizer.
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
    counts_of_greedy: GreedyCounts | None = None
    normalizer: str = ""
    normalized: "ScoredUtterance | None" = None

    @property
    def key(self) -> tuple[str, str]:
        """Return the id and the reference, which two results must share to be compared."""
        return self.id, self.reference

    @cached_property
    def errors(self) -> TextErrors:
        return count_errors(self.reference, self.hypothesis)

    @property
    def counts(self) -> ErrorCounts:
        """Return the counts of words, or of characters in a language without spaces."""
        return self.errors.words if self.by_words else self.errors.characters

    @property
    def aligned_units(self) -> "UnitPairs":
        return pair_units(self.reference, self.hypothesis, by_words=self.by_words)


UnitPairs = list[tuple[str, str]]  # a unit of the reference and of the hypothesis; "" for none


def all_have_word_boundaries(utterances: Iterable[ScoredUtterance]) -> bool:
    """Check whether all utterances are in a language with spaces between words."""
    return all(utterance.by_words for utterance in utterances)


def pair_units(reference: str, hypothesis: str, *, by_words: bool = True) -> UnitPairs:
    """Pair each word, or character, with its counterpart, "" if there is none."""
    expected, actual = reference.split(), hypothesis.split()
    if not by_words:
        expected, actual = list(SHOWN_SPACE.join(expected)), list(SHOWN_SPACE.join(actual))
    pairs: UnitPairs = []
    for block in Levenshtein.opcodes(expected, actual):
        expected_block = expected[block.src_start : block.src_end]
        actual_block = actual[block.dest_start : block.dest_end]
        pairs += zip_longest(expected_block, actual_block, fillvalue="")
    return pairs


def total_errors(utterances: Iterable[ScoredUtterance]) -> TextErrors:
    """Add the errors of a whole split."""
    return sum((utterance.errors for utterance in utterances), TextErrors())


def counts_of_each(
    utterances: Sequence[ScoredUtterance], *, by_words: bool
) -> dict[str, list[ErrorCounts]]:
    """Return the counts of each utterance, by the name of the rate."""
    counts = [utterance.errors.counts_by_rate(by_words=by_words) for utterance in utterances]
    names = TextErrors().counts_by_rate(by_words=by_words)
    return {name: [by_name[name] for by_name in counts] for name in names}


def greedy_shares(utterances: Iterable[ScoredUtterance]) -> dict[str, float]:
    """Return the share of blank frames, and the tokens written per token of the transcripts.

    Empty if nothing was counted.
    """
    counts = [u.counts_of_greedy for u in utterances if u.counts_of_greedy is not None]
    if not counts:
        return {}
    frames, blanks, written, expected = map(sum, zip(*counts, strict=True))
    return {BLANK_FRAMES: ratio(blanks, frames), TOKENS_WRITTEN: ratio(written, expected)}


def count_errors(reference: str, hypothesis: str) -> TextErrors:
    """Count word and character errors of one utterance; either side may be empty.

    White space separates words, and any run of it counts as one space. Characters are code points,
    spaces included, as in jiwer: "ab" for "a b" has one deletion in three.

    >>> count_errors("all circuits are busy", "all circuit busy").wer
    0.5
    """
    reference_words = reference.split()
    hypothesis_words = hypothesis.split()
    words = _count_edits(reference_words, hypothesis_words)
    characters = _count_edits(" ".join(reference_words), " ".join(hypothesis_words))
    return TextErrors(words=words, characters=characters, utterances=1)


def word_correctness(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """Return for each word of a hypothesis whether it is correct."""
    blocks = Levenshtein.opcodes(reference, hypothesis)  # in order, over the whole hypothesis
    return [b.tag == "equal" for b in blocks for _ in range(b.dest_start, b.dest_end)]


def format_alignment(
    reference: str, hypothesis: str, *, by_words: bool = True
) -> tuple[str, str, str]:
    """Write two texts in aligned columns, and a third line that marks their errors.

    An error is S, D or I, and ``*`` stands for a missing word or character. Columns are as wide as
    a terminal shows them: two cells for a CJK character, none for a combining accent.
    """
    cells: tuple[list[str], list[str], list[str]] = ([], [], [])
    for expected, actual in pair_units(reference, hypothesis, by_words=by_words):
        width = max(1, cell_len(expected), cell_len(actual))
        filler = "*" * width
        column = (expected or filler, actual or filler, mark_pair(expected, actual))
        for line, cell in zip(cells, column, strict=True):
            line.append(cell + " " * (width - cell_len(cell)))
    separator = " " if by_words else ""
    first, second, marks = (separator.join(line).rstrip() for line in cells)
    return first, second, marks


def _count_edits(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    kinds = [kind for kind, _, _ in Levenshtein.editops(reference, hypothesis).as_list()]
    substitutions, deletions, insertions = map(kinds.count, ("replace", "delete", "insert"))
    return ErrorCounts(substitutions, deletions, insertions, len(reference))


def mark_pair(reference: str, hypothesis: str) -> str:
    """Return S, D or I for a word and its counterpart, "" if they are equal."""
    if reference == hypothesis:
        return ""
    if not hypothesis:
        return "D"
    return "S" if reference else "I"
