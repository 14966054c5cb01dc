"""Compare written formats with the trained model, and report the result for parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format runs on noise, in a grid of batch x length x padding, and on all clips of the run's
test sets if they are available. Its log-probabilities, best tokens and error rates are compared
with the trained model's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from typing import Any

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.segments import TAIL_SECONDS
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.bundle import Bundle
from sbkit.decoding.greedy import best_tokens
from sbkit.decoding.word_times import GREEDY
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.evaluate.wer_report import rates_and_counts
from sbkit.export.trace import WaveformModel, trained_log_probs
from sbkit.logs.progress import progress_bar
from sbkit.models.pretrained.whisper import StoredPositions
from sbkit.runtime.batch_shapes import pad_clips
from sbkit.runtime.model_thread import model_errors
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.score_sets import read_whole_clips
from sbkit.runtime.torch_model import TorchBundle

TestSets = Mapping[str, datasets.Dataset]
# audio (B, S) between -1 and 1, and lengths (B,)
RunBatch = Callable[[Float32s, Counts], BatchLogProbs]
Transcribe = Callable[[Sequence[Float32s]], list[str]]
PADDINGS = ("none", "ragged", "beyond")
EXTRA_SECONDS = 1.0  # past the longest clip in "beyond"; one more sample avoids a round number
MAX_DIFFERENCE = 1e-4  # between log-probabilities, for a format that computes in float32
# For Whisper, whose states reach 500: on noise, log-probabilities of `base` differ by 5e-4 in
# onnxruntime, and its states by 3e-4 in two forms of attention of transformers; on speech, by 5e-5.
MAX_WHISPER_DIFFERENCE = 1e-3
# Two tokens of a frame that are closer than this in the trained model are tied: each of them may
# come first in a format that keeps to MAX_DIFFERENCE.
TIE_DIFFERENCE = 2 * MAX_DIFFERENCE
# By which the WER of the test sets may be higher; in a language without words, their CER.
MAX_WER_DIFFERENCE = 0.01
# Whose tokens a decoder of its own reads in every clip, so that its scores can be compared.
PARITY_TEXT = "1 2 3 4 5 6 7 8"


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
        files: removed if it misses its limits.
        is_exact: whether log-probabilities and tokens must equal the trained model's; otherwise
            only error rates are compared.
        zeros: the samples of silence that the format's users append to a clip.
        trained: the trained model on the same input, if it is not a clip as a bundle takes it.
        transcribe: transcribes clips (S,), if the format's users have a decoder of their own.
        trained_texts: what the trained model writes, unless CTC writes it.
        advice: what to do if its error rate is higher.
    """

    name: str
    files: Sequence[str]
    log_probs: RunBatch
    is_exact: bool = True
    zeros: int = 0
    trained: RunBatch | None = None
    transcribe: Transcribe | None = None
    trained_texts: Transcribe | None = None
    advice: str = ""


@dataclass(frozen=True)
class Grid:
    """Batch sizes and lengths in seconds, each with every way to pad.

    none: all clips have one length; ragged: each is shorter than the one before; beyond: ragged,
    with a second of zeros past the longest.

    >>> [case.description for case in Grid(batch_sizes=(1,), seconds=(0.5,)).cases(16_000)]
    ['1 x 0.5 s, padding: none', '1 x 0.5 s, padding: beyond']
    """

    batch_sizes: tuple[int, ...] = (1, 2, 5)
    seconds: tuple[float, ...] = (0.3, 2.0, 10.0, 40.0)

    def up_to(self, longest: float) -> "Grid":
        """Return a grid without longer clips than so many seconds, but with clips of these."""
        return replace(self, seconds=tuple(dict.fromkeys(min(s, longest) for s in self.seconds)))

    @property
    def combinations(self) -> list[tuple[int, float, str]]:
        combinations = product(self.batch_sizes, self.seconds, PADDINGS)
        return [(b, s, padding) for b, s, padding in combinations if b > 1 or padding != "ragged"]

    def cases(self, sample_rate: int) -> Iterator[Case]:
        """Yield every combination, filled with noise that swells and fades four times a second."""
        random = np.random.default_rng(0)
        for batch_size, seconds, padding in self.combinations:
            longest = seconds_to_samples(seconds, sample_rate)
            shares = np.linspace(1.0, 0.4, batch_size) if padding != "none" else np.ones(batch_size)
            lengths = (longest * shares).astype(np.int64)
            extra = seconds_to_samples(EXTRA_SECONDS, sample_rate) + 1 if padding == "beyond" else 0
            audio = np.zeros((batch_size, longest + extra), np.float32)
            for clip, length in zip(audio, lengths, strict=True):
                loudness = 0.05 + 0.05 * np.sin(np.arange(length) * (8 * np.pi / sample_rate))
                clip[:length] = loudness * random.standard_normal(length)
            yield Case(audio, lengths, f"{batch_size} x {seconds:g} s, padding: {padding}")


FULL_GRID = Grid()


@dataclass
class Agreement:
    """How far a candidate is from the trained model, over all batches."""

    largest_difference: float = 0.0
    where: str = ""
    utterances: int = 0
    utterances_with_other_tokens: int = 0

    def add(
        self, expected: BatchLogProbs, actual: BatchLogProbs, *, blank: int, where: str
    ) -> None:
        """Compare a batch; other lengths are an infinite difference."""
        self.utterances += len(expected.lengths)
        if not np.array_equal(expected.lengths, actual.lengths):
            self.largest_difference = float("inf")
            self.where = f"{where}: other lengths"
            self.utterances_with_other_tokens += len(expected.lengths)
            return
        for trained, written in zip(_split(expected), _split(actual), strict=True):
            if best_tokens(trained, blank) != best_tokens(written, blank):
                chosen = np.take_along_axis(trained, written.argmax(1)[:, None], 1).squeeze(1)
                are_ties = bool((trained.max(1) - chosen <= TIE_DIFFERENCE).all())
                self.utterances_with_other_tokens += not are_ties
            difference = float(np.abs(trained - written).max(initial=0))
            if not difference <= self.largest_difference:  # also true for NaN
                self.largest_difference = difference
                self.where = where


@dataclass
class Comparison:
    """The comparison of a candidate with the trained model, on the grid and on test clips.

    Attributes:
        errors, trained_errors: of the two models' transcripts.
        other_words: the number of transcripts with other words than the trained model's.
        failure: describes the candidate's first error, after which it does not run again.
    """

    candidate: Candidate
    bundle: TorchBundle
    grid: Agreement = field(default_factory=Agreement)
    clips: Agreement = field(default_factory=Agreement)
    errors: TextErrors = field(default_factory=TextErrors)
    trained_errors: TextErrors = field(default_factory=TextErrors)
    other_words: int = 0
    failure: str = ""

    def add(self, case: Case, expected: BatchLogProbs) -> None:
        """Run the candidate on a batch, and compare its output with the trained model's."""
        if self.failure:
            return
        try:
            actual = self.candidate.log_probs(case.audio, case.lengths)
            texts = self._transcribe(case, actual)
        except Exception as error:  # the graph of an LSTM may fail at other lengths
            self.failure = describe_failure(case.description, error)
            return
        agreement = self.clips if case.rows else self.grid
        agreement.add(expected, actual, blank=self.bundle.blank, where=case.description)
        if texts:
            write = self.candidate.trained_texts
            trained_texts = write(_clips(case)) if write else self._decode(expected)
            for row, text, trained in zip(case.rows, texts, trained_texts, strict=True):
                self.errors += count_errors(row["text"], text)
                self.trained_errors += count_errors(row["text"], trained)
                self.other_words += text.split() != trained.split()

    def _transcribe(self, case: Case, output: BatchLogProbs) -> list[str]:
        if not case.rows or self.bundle.labels is None:
            return []
        if self.candidate.transcribe is None:
            return self._decode(output)
        return self.candidate.transcribe(_clips(case))

    def _decode(self, output: BatchLogProbs) -> list[str]:
        best = (best_tokens(clip, self.bundle.blank) for clip in _split(output))
        return [self.bundle.tokenizer.decode(tokens) for tokens in best]

    @property
    def max_difference(self) -> float:
        return MAX_WHISPER_DIFFERENCE if _stored_positions(self.bundle) else MAX_DIFFERENCE

    def reasons(self) -> list[str]:
        """Say in a sentence each which limits the candidate misses."""
        if self.failure:
            return [self.failure]
        reasons = []
        for agreement in (self.grid, self.clips) if self.candidate.is_exact else ():
            worst, others = agreement.largest_difference, agreement.utterances_with_other_tokens
            if not worst <= self.max_difference:
                reasons.append(
                    f"log-probabilities differ by {worst:.1e} ({agreement.where}); at most "
                    f"{self.max_difference:.0e} is allowed"
                )
            if others:
                reasons.append(f"{others} of {agreement.utterances} utterances have other tokens")
        by_words = self.bundle.config.has_words
        name, rate = next(iter(self.errors.rates(by_words=by_words).items()))
        trained_rate = self.trained_errors.rates(by_words=by_words)[name]
        # Rounded, because 4 of 400 words are a bit above 0.01.
        if round(rate - trained_rate, 6) > MAX_WER_DIFFERENCE:
            reasons.append(
                f"{name} is {100 * rate:.2f} %, the trained model's is {100 * trained_rate:.2f} %; "
                f"it may be higher by {100 * MAX_WER_DIFFERENCE:g} points{self.candidate.advice}"
            )
        if not self.candidate.is_exact and not self.clips.utterances:
            reasons.append(
                "error rates can only be compared on the run's test sets, which are missing"
            )
        return reasons

    def report(self, grid: Grid, test_sets: TestSets | str) -> dict[str, Any]:
        """Return the parity report; ``test_sets`` may be the reason why there are none."""
        reasons = self.reasons()
        by_words = self.bundle.config.has_words
        exact_limits = {"difference": self.max_difference, "same_tokens": True}
        return {
            "written": not reasons,
            "reasons": reasons,
            "limits": {
                **(exact_limits if self.candidate.is_exact else {}),
                "word_error_rate": MAX_WER_DIFFERENCE,
            },
            "grid": {
                "batch": grid.batch_sizes,
                "seconds": grid.seconds,
                "padding": PADDINGS,
                **asdict(self.grid),
            },
            "test_sets": {"not_compared": test_sets}
            if isinstance(test_sets, str)
            else {
                "sets": {name: len(rows) for name, rows in test_sets.items()},
                **asdict(self.clips),
                "decoder": GREEDY,
                "transcripts_with_other_words": self.other_words,
                "error_rates": rates_and_counts(self.errors, by_words=by_words),
                "error_rates_of_the_trained_model": rates_and_counts(
                    self.trained_errors, by_words=by_words
                ),
            },
        }


def describe_failure(batch: str, error: Exception) -> str:
    """Say on which batch a format failed, and how."""
    return f"on {batch} it raised {type(error).__name__}: {printable(str(error))[:300]}"


def compare(
    bundle: TorchBundle,
    candidates: Mapping[str, Sequence[Candidate]],
    grid: Grid,
    test_sets: TestSets | str,
) -> dict[str, dict[str, Any]]:
    """Run all candidates and the trained model on the same audio; return the parity reports.

    Candidates and reports are by format; the reports of a format are by candidate.
    """
    rate = bundle.config.sample_rate
    trained = WaveformModel(bundle.model.network).eval()
    if positions := _stored_positions(bundle):
        samples = positions * bundle.model.samples_per_frame
        grid = grid.up_to(samples_to_seconds(samples, rate) - TAIL_SECONDS)
    comparisons = {
        format: [Comparison(candidate, bundle) for candidate in format_candidates]
        for format, format_candidates in candidates.items()
    }
    for case in cases(grid, test_sets, rate):
        with model_errors(case.description):
            expected = trained_log_probs(trained, case.audio, case.lengths)
        for comparison in chain.from_iterable(comparisons.values()):
            run, zeros = comparison.candidate.trained, comparison.candidate.zeros
            audio, lengths = np.pad(case.audio, ((0, 0), (0, zeros))), case.lengths + zeros
            own = replace(case, audio=audio, lengths=lengths)
            comparison.add(own, run(audio, lengths) if run else expected)
    return {
        format: {item.candidate.name: item.report(grid, test_sets) for item in format_comparisons}
        for format, format_comparisons in comparisons.items()
    }


def _stored_positions(bundle: TorchBundle) -> int:
    """Return the number of frames that Whisper's encoder has positions for; 0 for other models."""
    parts = bundle.model.network.model.modules()
    return sum(len(part.weight) for part in parts if isinstance(part, StoredPositions))


def cases(grid: Grid, test_sets: TestSets | str, rate: int) -> Iterator[Case]:
    """Yield the batches of the grid, then batches of test clips; show the progress."""
    sets = [] if isinstance(test_sets, str) else [*test_sets.values()]

    def test_cases() -> Iterator[Case]:
        for rows in sets:
            for batch in read_whole_clips(rows, rate):
                clips = [row["audio"] for row in batch.values()]
                audio, lengths = pad_clips(clips, max(map(len, clips)))
                description = f"{len(clips)} test clips"
                yield Case(audio / np.float32(FULL_SCALE), lengths, description, [*batch.values()])

    clips = sum(batch_size for batch_size, *_ in grid.combinations) + sum(map(len, sets))
    with progress_bar("comparing with the trained model", clips) as advance:
        for case in chain(grid.cases(rate), test_cases()):
            yield case
            advance(len(case.lengths))


def _split(output: BatchLogProbs) -> list[Float32s]:
    """Return the frames (U, V) of each utterance of a batch, without padding."""
    pairs = zip(output.log_probs, output.lengths.tolist(), strict=True)
    return [log_probs[:frames] for log_probs, frames in pairs]


def _clips(case: Case) -> list[Float32s]:
    return [clip[:length] for clip, length in zip(case.audio, case.lengths, strict=True)]


def greedy_texts(bundle: Bundle, clips: Sequence[Float32s]) -> list[str]:
    """Transcribe clips between -1 and 1 with the decoder greedy."""
    return bundle.with_decoder(GREEDY).transcribe(
        [np.rint(clip * FULL_SCALE).astype(np.int16) for clip in clips]
    )


def spelled(bundle: Bundle, text: str) -> str:
    """Normalize a text, and write it with the bundle's tokens."""
    return bundle.tokenizer.decode(bundle.tokenizer.encode(bundle.normalizer()(text)))


def join(utterances: Sequence[Float32s]) -> BatchLogProbs:
    """Pad the frames (U, V) of utterances to a batch."""
    padded = pad_sequence([torch.from_numpy(frames) for frames in utterances], batch_first=True)
    return BatchLogProbs(padded.numpy(), np.array([*map(len, utterances)]))
