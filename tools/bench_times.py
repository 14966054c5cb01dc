"""Measure the errors of word times on data whose column `word_times` has the true ones.

python -m tools.bench_times BUNDLE|RUN DATA [--decoder greedy|beam]
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

from sbkit.audio.io import Samples
from sbkit.base.process import run_main
from sbkit.base.units import samples_to_seconds
from sbkit.commands.score import open_model
from sbkit.decoding.words import WordOffsets
from sbkit.evaluate.wer import matching_words
from sbkit.export.export import change_config
from sbkit.runtime.test_sets import prepare_source, read_whole_clips
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.text.word import Word
from tools.bench import Figures, measure_once

TIMES_COLUMN = "word_times"  # start-end of each word of the normalized text, in seconds
MIN_PAUSE_SECONDS = 0.2
TOLERANCES_MS = (50, 100)
MS = 1000  # in a second


@dataclass(frozen=True)
class TimedText:
    """The words of one utterance with their times."""

    truth: tuple[Word, ...]
    recognized: tuple[Word, ...]
    aligned: tuple[Word, ...]  # the words of the truth, timed by the model


def time_source(bundle: TorchBundle, source: Path) -> list[TimedText]:
    """Recognize and align the words of a source that has the column `word_times`."""
    rows = prepare_source(bundle, source)

    def time_batch(rows: Sequence[Mapping[str, str]], clips: list[Samples]) -> list[TimedText]:
        truth = [read_truth(row["text"], row[TIMES_COLUMN]) for row in rows]
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
    frame = samples_to_seconds(bundle.model.samples_per_frame, bundle.config.sample_rate)
    offsets = WordOffsets(*(round(median(errors) / frame, 2) for errors in (starts, ends)))
    change_config(folder, word_offsets=asdict(offsets))
    return offsets


def read_truth(text: str, times: str) -> tuple[Word, ...]:
    """Return the words of a text with their times: "0.31-0.52 0.6-0.9"."""
    spans = [map(float, span.split("-")) for span in times.split()]
    return tuple(Word(word, *span) for word, span in zip(text.split(), spans, strict=True))


def compare_times(pairs: Iterable[tuple[Sequence[Word], Sequence[Word]]]) -> Figures:
    """Compare the true words of utterances with their recognized or aligned ones."""
    signed: list[tuple[float, float]] = []  # measured minus true start and end, of correct words
    num_words = 0
    for truth, measured in pairs:
        num_words += len(truth)
        signed += [
            (measured[j].start - truth[i].start, measured[j].end - truth[i].end)
            for i, j in _matches(truth, measured)
        ]
    errors = MS * np.array(signed or [(np.nan, np.nan)])
    start, end = np.median(errors, axis=0)
    absolute = np.abs(errors)
    return {
        "words": f"{len(signed)} of {num_words}",
        "median (ms)": np.median(absolute),
        "mean (ms)": absolute.mean(),
        **{f"within {ms} ms": f"{np.mean(absolute <= ms):.1%}" for ms in TOLERANCES_MS},
        "starts (ms)": f"{start:+.0f}",
        "ends (ms)": f"{end:+.0f}",
    }


def _matches(truth: Sequence[Word], measured: Sequence[Word]) -> list[tuple[int, int]]:
    return matching_words([word.text for word in truth], [word.text for word in measured])


def main() -> None:
    """Fit the offsets if asked to, then measure the errors of word times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="BUNDLE|RUN")
    parser.add_argument("data", type=Path, metavar="DATA", help=f"a table with {TIMES_COLUMN}")
    parser.add_argument("--decoder", choices=("greedy", "beam"))
    parser.add_argument("--fit", action="store_true", help="write fitted offsets into the bundle")
    options = parser.parse_args()
    if options.fit:
        print(fit_offsets(options.model, options.data))
    with open_model(options.model) as bundle:
        texts = time_source(bundle.with_decoder(options.decoder), options.data)
    measure_once(
        {
            "recognized": lambda: compare_times((text.truth, text.recognized) for text in texts),
            "aligned": lambda: compare_times((text.truth, text.aligned) for text in texts),
        }
    )


if __name__ == "__main__":
    run_main(main)
