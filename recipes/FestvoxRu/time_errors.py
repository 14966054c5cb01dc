"""Errors of word times, against data that holds the true times.

The boundaries of words that were recognized are compared, after the field's way: median and mean
of absolute errors, the share within 50 and 100 ms (McAuliffe et al., Interspeech 2017), and the
signed medians of starts and ends.

Legend: N words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.commands.score import ScoreOptions, prepare_source, score_rows
from sbkit.decoding.alignment import WordOffsets
from sbkit.evaluate.wer import matching_words
from sbkit.export.export import change_config
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.text.word import Word

COLUMN = "word_times"  # start-end of every word of the normalized text, in seconds
PAUSE = 0.2  # seconds
MS = 1000
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TimeErrors:
    """What was found minus what is true, in seconds, (N,) each, of N of ``words`` words."""

    starts: Seconds
    ends: Seconds
    words: int

    def __str__(self) -> str:
        """Write the figures that the field compares."""
        if not len(self.starts):
            return f"none of {self.words} words has times"
        size = MS * np.abs(np.concatenate([self.starts, self.ends]))
        within = ", ".join(f"{np.mean(size <= most):.1%} within {most} ms" for most in (50, 100))
        start, end = (MS * np.median(each) for each in (self.starts, self.ends))
        return (
            f"{len(self.starts)} of {self.words} words: boundaries off by {np.median(size):.0f} ms "
            f"in the median, {size.mean():.0f} ms in the mean, {within}; signed median of starts "
            f"{start:+.0f} ms, of ends {end:+.0f} ms"
        )


@dataclass(frozen=True)
class TimedText:
    """One utterance: its true words, those that were recognized, and the true text aligned."""

    truth: tuple[Word, ...]
    recognized: tuple[Word, ...]
    aligned: tuple[Word, ...]


def time_source(bundle: TorchBundle, source: Path) -> list[TimedText]:
    """Time the words of a source that has the column word_times.

    Raises:
        SbkitError: the source cannot be read, or its times are not those of its words.
    """
    rows = prepare_source(bundle, source, ScoreOptions(), source.stem)
    if COLUMN not in rows.column_names:
        raise SbkitError(
            f"Data must have the column `{COLUMN}`, the true times of words, but "
            f"{source} has none. Take data as recipes/FestvoxRu writes it."
        )

    def score(rows: Sequence[Mapping[str, str]], clips: list[Samples]) -> list[TimedText]:
        truth = [read_truth(row["id"], row["text"], row[COLUMN]) for row in rows]
        recognized = [each.words for each in bundle.recognize(clips, times=True)]
        aligned = bundle.align(clips, [row["text"] for row in rows])
        return [TimedText(*each) for each in zip(truth, recognized, aligned, strict=True)]

    timed: list[TimedText] = score_rows(bundle, rows, score)
    return timed


def fit_offsets(folder: Path, source: Path) -> WordOffsets:
    """Fit the offsets of a bundle to the true times of a source, and write them into it.

    They are the medians over the words with a pause before or after them.

    Raises:
        SbkitError: it is no bundle, or the source has no words with times.
    """
    bundle = load_bundle(folder)
    plain = replace(bundle, config=replace(bundle.config, word_offsets=WordOffsets(0.0, 0.0)))
    starts: list[float] = []
    ends: list[float] = []
    for each in time_source(plain, source):
        gaps = [inf, *(after.start - word.end for word, after in pairwise(each.truth)), inf]
        for here, there in _same(each.truth, each.aligned):
            true, found = each.truth[here], each.aligned[there]
            starts += [true.start - found.start] if gaps[here] >= PAUSE else []
            ends += [true.end - found.end] if gaps[here + 1] >= PAUSE else []
    if not starts:
        raise SbkitError(
            f"Data must have words to fit offsets to, but {source} has none. Take other data."
        )
    frame = samples_to_seconds(bundle.model.samples_per_frame, bundle.config.sample_rate)
    offsets = WordOffsets(*(round(median(each) / frame, 2) for each in (starts, ends)))
    change_config(folder, word_offsets=asdict(offsets))
    return offsets


def read_truth(id: str, text: str, times: str) -> tuple[Word, ...]:
    """Read the times of the words of a text.

    Raises:
        SbkitError: there are more or fewer of them than words, or one is no time.
    """
    pairs = [each.partition("-") for each in times.split()]
    try:
        spans = [(float(start), float(end)) for start, _, end in pairs]
    except ValueError:
        spans = []
    words = text.split()
    if len(spans) != len(words):
        raise SbkitError(
            f"`{COLUMN}` must have a start and an end in seconds for each word, as 0.31-0.52, but "
            f"that of {id} has {len(spans)} for {len(words)} words. Prepare the corpus again."
        )
    return tuple(Word(word, *span) for word, span in zip(words, spans, strict=True))


def compare_times(pairs: Iterable[tuple[Sequence[Word], Sequence[Word]]]) -> TimeErrors:
    """Compare the words that both have, of utterances: true ones and found ones."""
    errors, words = [], 0
    for truth, found in pairs:
        words += len(truth)
        errors += [
            (found[there].start - truth[here].start, found[there].end - truth[here].end)
            for here, there in _same(truth, found)
        ]
    both = np.array(errors, np.float64).reshape(-1, 2)
    return TimeErrors(both[:, 0], both[:, 1], words)


def _same(truth: Sequence[Word], found: Sequence[Word]) -> list[tuple[int, int]]:
    return matching_words([each.text for each in truth], [each.text for each in found])
