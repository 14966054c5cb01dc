"""Measure the errors of word times on data whose column `word_times` has the true ones.

python -m tools.bench_times BUNDLE|RUN DATA [--decoder greedy|beam|graph]
python -m tools.bench_times BUNDLE DATA --fit    (fits the offsets, and writes them into the bundle)

Compares the words that were recognized correctly, then the words of the true text, aligned. Prints
the median and mean absolute errors of starts and ends, the share within 50 and 100 ms (McAuliffe et
al., Interspeech 2017), and the signed medians of starts and ends.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.errors import DataError
from sbkit.base.process import run_main
from sbkit.base.units import samples_to_seconds
from sbkit.commands.score import open_model
from sbkit.decoding.words import WordOffsets
from sbkit.evaluate.wer import matching_words
from sbkit.export.export import change_config
from sbkit.runtime.test_sets import prepare_source, read_whole_clips
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.text.word import Word

TIMES_COLUMN = "word_times"  # start-end of each word of the normalized text, in seconds
MIN_PAUSE_SECONDS = 0.2
TOLERANCES_MS = (50, 100)
MS = 1000  # in a second
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TimeErrors:
    """Measured minus true times of the N correct words, (N,) each; num_words: of the truth."""

    starts: Seconds
    ends: Seconds
    num_words: int

    def __str__(self) -> str:
        if not len(self.starts):
            return f"none of {self.num_words} words has times"
        errors = MS * np.abs(np.concatenate([self.starts, self.ends]))
        within = ", ".join(f"{np.mean(errors <= ms):.1%} within {ms} ms" for ms in TOLERANCES_MS)
        start, end = (MS * np.median(signed) for signed in (self.starts, self.ends))
        return (
            f"{len(self.starts)} of {self.num_words} words: median error of boundaries "
            f"{np.median(errors):.0f} ms, mean {errors.mean():.0f} ms, {within}; signed median of "
            f"starts {start:+.0f} ms, of ends {end:+.0f} ms"
        )


@dataclass(frozen=True)
class TimedText:
    """The words of one utterance with their times."""

    truth: tuple[Word, ...]
    recognized: tuple[Word, ...]
    aligned: tuple[Word, ...]  # the words of the truth, timed by the model


def time_source(bundle: TorchBundle, source: Path) -> list[TimedText]:
    """Recognize and align the words of a source that has the column `word_times`.

    Raises:
        DataError: the source cannot be read, or its times do not match its words.
    """
    rows = prepare_source(bundle, source)
    if TIMES_COLUMN not in rows.column_names:
        raise DataError(
            f"{source} has no column `{TIMES_COLUMN}` with the true times of words. Use data such "
            "as recipes/FestvoxRu writes."
        )

    def time_batch(rows: Sequence[Mapping[str, str]], clips: list[Samples]) -> list[TimedText]:
        truth = [read_truth(row["id"], row["text"], row[TIMES_COLUMN]) for row in rows]
        recognized = [result.words for result in bundle.recognize(clips, times=True)]
        aligned = bundle.align(clips, [row["text"] for row in rows])
        return [TimedText(*words) for words in zip(truth, recognized, aligned, strict=True)]

    by_row: dict[int, TimedText] = {}
    for batch in read_whole_clips(rows, bundle.config.sample_rate):
        clips = [row["audio"] for row in batch.values()]
        by_row |= zip(batch, time_batch([*batch.values()], clips), strict=True)
    return [by_row[row] for row in sorted(by_row)]


def fit_offsets(folder: Path, source: Path) -> WordOffsets:
    """Fit the word offsets of a bundle to the true times of a source, and write them into it.

    Each offset is a median: of starts after a pause, and of ends before a pause.

    Raises:
        BundleError: the folder is not a bundle.
        DataError: the source has no such starts or ends.
    """
    bundle = load_bundle(folder)
    no_offsets = replace(bundle.config, word_offsets=WordOffsets(0.0, 0.0))
    starts: list[float] = []
    ends: list[float] = []
    for text in time_source(replace(bundle, config=no_offsets), source):
        pauses = [inf, *(after.start - word.end for word, after in pairwise(text.truth)), inf]
        for true_index, aligned_index in _matches(text.truth, text.aligned):
            true = text.truth[true_index]
            aligned = text.aligned[aligned_index]
            if pauses[true_index] >= MIN_PAUSE_SECONDS:
                starts.append(true.start - aligned.start)
            if pauses[true_index + 1] >= MIN_PAUSE_SECONDS:
                ends.append(true.end - aligned.end)
    if not (starts and ends):
        raise DataError(f"{source} has no words to fit offsets to. Use other data.")
    frame = samples_to_seconds(bundle.model.samples_per_frame, bundle.config.sample_rate)
    offsets = WordOffsets(*(round(median(errors) / frame, 2) for errors in (starts, ends)))
    change_config(folder, word_offsets=asdict(offsets))
    return offsets


def read_truth(id: str, text: str, times: str) -> tuple[Word, ...]:
    """Read the times of the words of a text.

    Raises:
        DataError: the number of times and words differ, or a time cannot be parsed.
    """
    pairs = [pair.partition("-") for pair in times.split()]
    try:
        spans = [(float(start), float(end)) for start, _, end in pairs]
    except ValueError:
        spans = []
    words = text.split()
    if len(spans) != len(words):
        raise DataError(
            f"`{TIMES_COLUMN}` needs a start and an end in seconds for each word, such as "
            f"0.31-0.52. {id} has {len(spans)} for {len(words)} words. Prepare the corpus again."
        )
    return tuple(Word(word, *span) for word, span in zip(words, spans, strict=True))


def compare_times(pairs: Iterable[tuple[Sequence[Word], Sequence[Word]]]) -> TimeErrors:
    """Compare the true words of utterances with their recognized or aligned ones."""
    errors = []
    num_words = 0
    for truth, measured in pairs:
        num_words += len(truth)
        errors += [
            (measured[j].start - truth[i].start, measured[j].end - truth[i].end)
            for i, j in _matches(truth, measured)
        ]
    starts, ends = np.array(errors, np.float64).reshape(-1, 2).T
    return TimeErrors(starts, ends, num_words)


def _matches(truth: Sequence[Word], measured: Sequence[Word]) -> list[tuple[int, int]]:
    return matching_words([word.text for word in truth], [word.text for word in measured])


def main() -> None:
    """Fit the offsets if asked to, then measure the errors of word times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="BUNDLE|RUN")
    parser.add_argument("data", type=Path, metavar="DATA", help=f"a table with {TIMES_COLUMN}")
    parser.add_argument("--decoder", choices=("greedy", "beam", "graph"))
    parser.add_argument("--fit", action="store_true", help="write fitted offsets into the bundle")
    options = parser.parse_args()
    if options.fit:
        print(fit_offsets(options.model, options.data))
    with open_model(options.model) as bundle:
        texts = time_source(bundle.with_decoder(options.decoder), options.data)
    print(f"recognized: {compare_times((text.truth, text.recognized) for text in texts)}")
    print(f"aligned: {compare_times((text.truth, text.aligned) for text in texts)}")


if __name__ == "__main__":
    run_main(main)
