"""Compare written formats with the trained model, and report the result for parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format runs on batches of noise, and on all clips of the run's test sets if they are
available. Its outputs, texts and error rates are compared with the trained model's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.messages import printable
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.bundle import Bundle
from sbkit.decoding.word_times import GREEDY
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.evaluate.wer_report import rates_and_counts
from sbkit.export.trace import WaveformModel, trained_log_probs
from sbkit.logs.progress import progress_bar
from sbkit.runtime.batch_shapes import pad_clips
from sbkit.runtime.model_thread import model_errors
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.score_sets import read_whole_clips
from sbkit.runtime.torch_model import TorchModel

TestSets = Mapping[str, datasets.Dataset]
Outputs = BatchLogProbs | Sequence[Array]
RunBatch = Callable[[Float32s, Counts], Outputs]  # audio (B, S) between -1 and 1, and lengths (B,)
Texts = Callable[[Sequence[Float32s], Sequence[Array]], list[str]]  # from clips and their outputs
BATCH_SIZES = (1, 3)
SECONDS = (0.3, 2.0, 10.0)
EXTRA_SECONDS = 1.0  # zeros past the longest clip; one more sample avoids a round number
# Between outputs in float32. Whisper needs as much: its states reach 500, so on noise,
# log-probabilities of `base` differ by 5e-4 in onnxruntime.
MAX_OUTPUT_DIFFERENCE = 1e-3
# A value between two integers may be rounded to either.
MAX_INTEGER_MISMATCH_SHARE = 1e-3
# The WER of the test sets may be higher by this; in a language without words, their CER.
MAX_WER_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Case:
    """One batch: audio (B, S) between -1 and 1, zero past its lengths (B,).

    description: for messages.
    rows: the rows of a test set; empty for noise.
    """

    audio: Float32s
    lengths: Counts
    description: str
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A written format, or one of its precisions, as its users run it.

    Attributes:
        files: removed if the candidate exceeds a limit.
        is_exact: whether its outputs must equal the trained model's; otherwise only error rates are
            limited.
        tail_samples: the number of zeros that the format's users append to a clip.
        run_trained: computes what the outputs of `run` must equal, if these are not the
            log-probabilities of a bundle; None: the bundle does, from the clips without a tail.
        texts: makes the texts whose errors are counted, from clips (S,) and the outputs for them.
        trained_texts: makes the trained model's, from its log-probabilities.
        advice: what to do if its error rate is higher.
    """

    name: str
    files: Sequence[str]
    run: RunBatch
    is_exact: bool = True
    tail_samples: int = 0
    run_trained: RunBatch | None = None
    texts: Texts | None = None
    trained_texts: Texts | None = None
    advice: str = ""


def noise_case(batch_size: int, seconds: float, rate: int, *, is_padded: bool = False) -> Case:
    """Make a batch of noise that swells and fades four times a second.

    is_padded: make each clip shorter than the one before, and pad the longest with zeros.
    """
    random = np.random.default_rng(0)
    longest = seconds_to_samples(seconds, rate)
    length_shares = np.linspace(1.0, 0.4, batch_size) if is_padded else np.ones(batch_size)
    lengths = (longest * length_shares).astype(np.int64)
    extra = seconds_to_samples(EXTRA_SECONDS, rate) + 1 if is_padded else 0
    audio = np.zeros((batch_size, longest + extra), np.float32)
    for clip, length in zip(audio, lengths, strict=True):
        loudness = 0.05 + 0.05 * np.sin(np.arange(length) * (8 * np.pi / rate))
        clip[:length] = loudness * random.standard_normal(length)
    padding = "with" if is_padded else "without"
    return Case(audio, lengths, f"{batch_size} x {seconds:g} s of noise, {padding} padding")


def largest_difference(trained: Array, written: Array) -> float:
    """Return the largest difference between two arrays, infinite if there is a NaN.

    Raises ValueError if their shapes differ.
    """
    if trained.shape != written.shape:  # other shapes could broadcast
        raise ValueError(f"shape {written.shape} instead of {trained.shape}")
    difference = float(np.abs(trained - written).max(initial=0))
    return math.inf if math.isnan(difference) else difference


@dataclass
class Comparison:
    """The comparison of a candidate with the trained model, on noise and on test clips.

    Attributes:
        difference: the largest difference between floats, such as log-probabilities.
        where: the batch with that difference.
        integer_mismatches, integers: the number of integers that differ, and of all.
        errors, trained_errors: the errors of the candidate's and the trained model's texts.
        num_different: the number of texts whose words differ from the trained model's.
        failure: describes the candidate's first error, after which it does not run again.
    """

    candidate: Candidate
    bundle: Bundle[TorchModel]
    difference: float = 0.0
    where: str = ""
    integer_mismatches: int = 0
    integers: int = 0
    errors: TextErrors = field(default_factory=TextErrors)
    trained_errors: TextErrors = field(default_factory=TextErrors)
    num_different: int = 0
    failure: str = ""

    def add(self, case: Case, trained: Outputs) -> None:
        """Run the candidate on a batch, and compare its outputs with the trained model's.

        trained: the log-probabilities of the bundle; empty if its task has graphs.
        """
        if self.failure:
            return
        candidate = self.candidate
        run, tail = candidate.run_trained, candidate.tail_samples
        expected = _arrays(run(case.audio, case.lengths) if run else trained)
        audio = np.pad(case.audio, ((0, 0), (0, tail)))
        padded_case = replace(case, audio=audio, lengths=case.lengths + tail)
        try:
            actual = _arrays(candidate.run(padded_case.audio, padded_case.lengths))
            pairs = [*zip(expected, actual, strict=True)]
            differences = [largest_difference(*pair) for pair in pairs]
            texts: list[str] = []
            if candidate.texts and case.rows:
                texts = candidate.texts(_clips(padded_case), actual)
        except Exception as error:  # the graph of an LSTM may fail at other lengths
            message = printable(str(error))[:300]
            self.failure = f"on {case.description} it raised {type(error).__name__}: {message}"
            return
        for (array, written), difference in zip(pairs, differences, strict=True):
            if array.dtype.kind == "i":
                self.integer_mismatches += int((array != written).sum())
                self.integers += array.size
            elif difference > self.difference:
                self.difference = difference
                self.where = case.description
        if texts and candidate.trained_texts:
            trained_texts = candidate.trained_texts(_clips(case), _arrays(trained))
            for row, text, trained_text in zip(case.rows, texts, trained_texts, strict=True):
                self.errors += count_errors(row["text"], text)
                self.trained_errors += count_errors(row["text"], trained_text)
                self.num_different += text.split() != trained_text.split()

    def reasons(self) -> list[str]:
        """Return a sentence for each limit that the candidate exceeds."""
        if self.failure:
            return [self.failure]
        reasons = []
        if self.candidate.is_exact and self.difference > MAX_OUTPUT_DIFFERENCE:
            reasons.append(
                f"outputs differ by {self.difference:.1e} ({self.where}); at most "
                f"{MAX_OUTPUT_DIFFERENCE:.0e} is allowed"
            )
        if self.integer_mismatches > MAX_INTEGER_MISMATCH_SHARE * self.integers:
            reasons.append(f"{self.integer_mismatches} of {self.integers} integers differ")
        by_words = self.bundle.config.has_words
        name = "WER" if by_words else "CER"
        rate, trained_rate = (
            errors.rates(by_words=by_words)[name] for errors in (self.errors, self.trained_errors)
        )
        # Rounded, because 4 of 400 words are a bit above 0.01.
        if round(rate - trained_rate, 6) > MAX_WER_DIFFERENCE:
            reasons.append(
                f"{name} is {100 * rate:.2f} %, the trained model's is {100 * trained_rate:.2f} %; "
                f"it may be higher by {100 * MAX_WER_DIFFERENCE:g} points{self.candidate.advice}"
            )
        if not self.candidate.is_exact and not self.errors.utterances:
            reasons.append(
                "error rates can only be compared on the run's test sets, which are missing"
            )
        return reasons

    def report(self, test_sets: TestSets | str) -> dict[str, Any]:
        """Return the parity report; ``test_sets`` may be a text: why there are no test sets."""
        reasons = self.reasons()
        by_words = self.bundle.config.has_words
        compared: dict[str, Any] = {"not_compared": test_sets}
        if not isinstance(test_sets, str):
            compared = {"sets": {name: len(rows) for name, rows in test_sets.items()}}
        if self.errors.utterances:
            compared |= {
                "decoder": GREEDY,
                "texts_with_other_words": self.num_different,
                "error_rates": rates_and_counts(self.errors, by_words=by_words),
                "error_rates_of_the_trained_model": rates_and_counts(
                    self.trained_errors, by_words=by_words
                ),
            }
        return {
            "written": not reasons,
            "reasons": reasons,
            "largest_difference": self.difference,
            "where": self.where,
            "integer_mismatches": self.integer_mismatches,
            "integers": self.integers,
            "test_sets": compared,
        }


def compare_candidates(
    bundle: Bundle[TorchModel],
    candidates: Mapping[str, Sequence[Candidate]],
    test_sets: TestSets | str,
) -> dict[str, dict[str, Any]]:
    """Run all candidates and the trained model on the same audio; return the parity reports.

    candidates: by format. Reports are by format and candidate.
    """
    rate = bundle.config.sample_rate
    trained = None if bundle.task.graphs else WaveformModel(bundle.model.network).eval()
    comparisons = {
        format: [Comparison(candidate, bundle) for candidate in format_candidates]
        for format, format_candidates in candidates.items()
    }
    for case in cases(test_sets, rate):
        with model_errors(case.description):
            expected = trained_log_probs(trained, case.audio, case.lengths) if trained else ()
        for comparison in chain.from_iterable(comparisons.values()):
            comparison.add(case, expected)
    return {
        format: {item.candidate.name: item.report(test_sets) for item in format_comparisons}
        for format, format_comparisons in comparisons.items()
    }


def cases(test_sets: TestSets | str, rate: int) -> Iterator[Case]:
    """Yield batches of noise, then batches of test clips; show the progress."""
    grid = [*product(BATCH_SIZES, SECONDS, (False, True))]
    sets = [] if isinstance(test_sets, str) else [*test_sets.values()]

    def test_cases() -> Iterator[Case]:
        for rows in sets:
            for batch in read_whole_clips(rows, rate):
                clips = [row["audio"] for row in batch.values()]
                audio, lengths = pad_clips(clips, max(map(len, clips)))
                description = f"{len(clips)} test clips"
                yield Case(audio / np.float32(FULL_SCALE), lengths, description, [*batch.values()])

    noise_cases = (
        noise_case(size, seconds, rate, is_padded=padded) for size, seconds, padded in grid
    )
    num_clips = sum(size for size, *_ in grid) + sum(map(len, sets))
    with progress_bar("comparing with the trained model", num_clips) as advance:
        for case in chain(noise_cases, test_cases()):
            yield case
            advance(len(case.lengths))


def _arrays(outputs: Outputs) -> list[Array]:
    """Return the outputs of a graph, or the frames (U, V) of each utterance without padding."""
    if not isinstance(outputs, BatchLogProbs):
        return [*outputs]
    pairs = zip(outputs.log_probs, outputs.lengths.tolist(), strict=True)
    return [log_probs[:frames] for log_probs, frames in pairs]


def _clips(case: Case) -> list[Float32s]:
    return [clip[:length] for clip, length in zip(case.audio, case.lengths, strict=True)]


def pad_frames(utterances: Sequence[Float32s]) -> BatchLogProbs:
    """Pad the frames (U, V) of utterances to a batch."""
    padded = pad_sequence([torch.from_numpy(frames) for frames in utterances], batch_first=True)
    return BatchLogProbs(padded.numpy(), np.array([*map(len, utterances)]))
