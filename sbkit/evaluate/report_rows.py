"""The rows of a report: chosen utterances of a test set, its frequent errors and unknown words."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import numpy as np

from sbkit.base.files import to_json
from sbkit.evaluate.wer import Scored, WordPairs, mark_pair
from sbkit.text.word import Word


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An utterance as each run recognized it; pairs: its aligned words, for each run.

    Of a language that writes no spaces between words, these are its characters.
    """

    runs: tuple[Scored, ...]
    pairs: tuple[WordPairs, ...]

    @property
    def id(self) -> str:
        """Return its id, which is the same for all."""
        return self.runs[0].id

    @property
    def errors(self) -> int:
        """Count the errors of all runs."""
        return sum(each.errors.errors for each in self.runs)


def compare_utterances(runs: Sequence[Iterable[Scored]]) -> list[Compared]:
    """Put the same utterances of each run together, in the order of their ids."""
    ordered = [sorted(each, key=lambda one: (one.id, one.reference)) for each in runs]
    return [
        Compared(runs=same, pairs=tuple(each.pairs for each in same))
        for same in zip(*ordered, strict=True)
    ]


def choose(utterances: Sequence[Compared]) -> list[Compared]:
    """Return them in the order of their use for a report: in turn the worst left, and one drawn.

    The same utterances give the same order.
    """
    worst_first = sorted(utterances, key=lambda each: (-each.errors, each.id))
    drawn = iter(np.random.default_rng(0).permutation(len(worst_first)).tolist())
    by_turns = (place for pair in zip(count(), drawn, strict=False) for place in pair)
    return [worst_first[place] for place in dict.fromkeys(by_turns)]


def row_sizes(utterances: Sequence[Compared]) -> list[int]:
    """Return how many bytes the rows take on the page up to each, without clips."""
    return [*accumulate(len(to_json(row(each, {})).encode()) for each in utterances)]


def row(utterance: Compared, clips: Mapping[str, str]) -> dict[str, Any]:
    """Return an utterance as plain data; ``clips`` are MP3 in base64, by id."""
    first = utterance.runs[0]
    sides = zip(utterance.runs, utterance.pairs, strict=True)
    return {
        "id": first.id,
        "reference": first.reference,
        "words": first.scores.words.total,
        "characters": first.scores.characters.total,
        "seconds": first.seconds,
        "speaker": first.speaker,
        "clip": clips.get(first.id),
        "runs": [_side(scored, pairs) for scored, pairs in sides],
    }


def _side(scored: Scored, pairs: WordPairs) -> dict[str, Any]:
    """Return a hypothesis; ``marks`` has S, D, I or, of a right word, = for each pair of words."""
    timed = [each.text for each in scored.words] == scored.hypothesis.split()
    return {
        "hypothesis": scored.hypothesis,
        "marks": "".join(mark_pair(*pair) or "=" for pair in pairs),
        "errors": scored.errors.errors,
        "character_errors": scored.scores.characters.errors,
        "heard": [_time(each) for each in scored.words] if timed else None,
    }


def _time(word: Word) -> list[float | None]:
    confidence = None if word.confidence is None else round(word.confidence, 3)
    return [round(word.start, 3), round(word.end, 3), confidence]


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A word, what was recognized instead, and how often by each run.

    One of the two is "": of a word that was inserted, or deleted.
    """

    reference: str
    hypothesis: str
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnknownWord:
    """A word of the references that the recognizer has never seen written.

    count: of its occurrences; right: of those recognized; instead: words recognized in its place,
    the most frequent first.
    """

    word: str
    count: int
    right: int
    instead: tuple[str, ...]


def confusions(runs: Sequence[Iterable[WordPairs]]) -> tuple[Confusion, ...]:
    """Return the errors of one run or several, the most frequent first."""
    counted = [
        Counter(pair for pairs in utterances for pair in pairs if pair[0] != pair[1])
        for utterances in runs
    ]
    together = sum(counted, Counter[tuple[str, str]]())
    ranked = sorted(together, key=lambda pair: (-together[pair], pair))
    return tuple(
        Confusion(
            reference=reference,
            hypothesis=hypothesis,
            counts=tuple(each[reference, hypothesis] for each in counted),
        )
        for reference, hypothesis in ranked
    )


def unknown_words(
    utterances: Iterable[WordPairs], known: Container[str]
) -> tuple[UnknownWord, ...]:
    """Return the words of the references that are not known, the most frequent first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pairs in utterances:
        for word, recognized in pairs:
            if word and word not in known:
                found[word][recognized] += 1
    words = (
        UnknownWord(
            word=word,
            count=counts.total(),
            right=counts[word],
            instead=tuple(other for other, _ in counts.most_common() if other not in (word, "")),
        )
        for word, counts in found.items()
    )
    return tuple(sorted(words, key=lambda each: (-each.count, each.word)))
