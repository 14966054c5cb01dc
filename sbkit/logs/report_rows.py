"""The utterances that a report shows, and what its page is told of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import numpy as np

from sbkit.base.files import to_json
from sbkit.text.wer import Scored, WordPairs, mark_pair, pair_words
from sbkit.text.word import Word


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An utterance as each run recognized it; pairs: its aligned words, for each run."""

    runs: tuple[Scored, ...]
    pairs: tuple[WordPairs, ...]

    @property
    def id(self) -> str:
        """Return its id, which is the same for all."""
        return self.runs[0].id

    @property
    def errors(self) -> int:
        """Count the word errors of all runs."""
        return sum(each.scores.words.errors for each in self.runs)


def compare_utterances(runs: Sequence[Iterable[Scored]]) -> list[Compared]:
    """Put the same utterances of each run together, in the order of their ids."""
    ordered = [sorted(each, key=lambda one: (one.id, one.reference)) for each in runs]
    return [
        Compared(
            runs=same,
            pairs=tuple(pair_words(x.reference.split(), x.hypothesis.split()) for x in same),
        )
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
        "errors": scored.scores.words.errors,
        "character_errors": scored.scores.characters.errors,
        "heard": [_time(each) for each in scored.words] if timed else None,
    }


def _time(word: Word) -> list[float | None]:
    confidence = None if word.confidence is None else round(word.confidence, 3)
    return [round(word.start, 3), round(word.end, 3), confidence]
