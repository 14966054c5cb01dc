"""Compare written formats with the trained model: the parity reports are parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format is compared on noise, on a grid of batch x length x padding, and, if the run's test
sets are available, on all of their clips: log-probabilities, best tokens, and error rates beside
those of the trained model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any

import datasets
import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.messages import printable
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.bundle import Bundle
from sbkit.decoding.greedy import best_tokens
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.evaluate.wer_report import error_figures
from sbkit.export.test_sets import read_whole_clips
from sbkit.export.traced import TrainedModel, trained_log_probs
from sbkit.logs.progress import progress_bar
from sbkit.runtime.model import naming_audio
from sbkit.runtime.onnx_model import BatchLogProbs

TestSets = Mapping[str, datasets.Dataset]
Run = Callable[[Float32s, Counts], BatchLogProbs]  # audio (B, S) between -1 and 1, and lengths (B,)
PADDINGS = ("none", "ragged", "beyond")
EXTRA_SECONDS = 1.0  # of "beyond", past the longest clip; a sample more makes no round number
MAX_DIFFERENCE = 1e-4  # between log-probabilities, for a format that computes in float32
MAX_WER_DIFFERENCE = 0.01  # on the test sets; of CER in a language without words


@dataclass(frozen=True)
class Case:
    """One batch: audio (B, S) between -1 and 1, zero past its lengths (B,).

    description: for messages.
    rows: the columns of each utterance of a test set; empty for noise.
    """

    audio: Float32s
    lengths: Counts
    description: str
    rows: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of_clips(cls, rows: Sequence[Mapping[str, Any]]) -> "Case":
        """Make a batch of the clips of a test set, given rows with `audio` (S,) int16."""
        lengths = np.array([len(row["audio"]) for row in rows], np.int64)
        audio = np.zeros((len(rows), lengths.max()), np.float32)
        for samples, length, row in zip(audio, lengths, rows, strict=True):
            samples[:length] = row["audio"] / np.float32(FULL_SCALE)
        return cls(audio, lengths, f"{len(rows)} test clips", rows)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A written format, or one of its precisions, as its users run it.

    Attributes:
        name: within its format.
        files: removed if it misses its limits.
        log_probs: runs it.
        is_exact: whether log-probabilities and tokens must equal the trained model's; otherwise
            only error rates are compared.
        transcribe: transcribes clips (S,), if the format's users have their own decoder.
        decoder: the decoder of the bundle that it is compared with.
        prepare: changes the audio first, for the trained model too.
    """

    name: str
    files: Sequence[str]
    log_probs: Run
    is_exact: bool = True
    transcribe: Callable[[Sequence[Float32s]], list[str]] | None = None
    decoder: str = GREEDY
    prepare: Callable[[Case], Case] | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """Return how far it may be from the trained model."""
        exact = {"difference": MAX_DIFFERENCE, "same_tokens": True} if self.is_exact else {}
        return {**exact, "word_error_rate": MAX_WER_DIFFERENCE}


@dataclass(frozen=True)
class Grid:
    """Batch sizes and lengths in seconds, each with every way to pad.

    none: all clips have one length; ragged: each is shorter than the one before; beyond: ragged,
    with a second of zeros past the longest.

    >>> [case.description for case in Grid(batches=(1,), seconds=(0.5,)).cases(16_000)]
    ['1 x 0.5 s, padding: none', '1 x 0.5 s, padding: beyond']
    """

    batches: tuple[int, ...] = (1, 2, 5)
    seconds: tuple[float, ...] = (0.3, 2.0, 10.0, 40.0)

    @property
    def combinations(self) -> list[tuple[int, float, str]]:
        """Return all batch sizes, lengths and paddings; one clip cannot be ragged."""
        combinations = product(self.batches, self.seconds, PADDINGS)
        return [(b, s, padding) for b, s, padding in combinations if b > 1 or padding != "ragged"]

    def cases(self, sample_rate: int) -> Iterator[Case]:
        """Yield every combination, filled with noise that swells and fades four times a second."""
        random = np.random.default_rng(0)
        for batch, seconds, padding in self.combinations:
            longest = seconds_to_samples(seconds, sample_rate)
            shares = np.linspace(1.0, 0.4, batch) if padding != "none" else np.ones(batch)
            lengths = (longest * shares).astype(np.int64)
            extra = seconds_to_samples(EXTRA_SECONDS, sample_rate) + 1 if padding == "beyond" else 0
            audio = np.zeros((batch, longest + extra), np.float32)
            for clip, length in zip(audio, lengths, strict=True):
                loudness = 0.05 + 0.05 * np.sin(np.arange(length) * (8 * np.pi / sample_rate))
                clip[:length] = loudness * random.standard_normal(length)
            yield Case(audio, lengths, f"{batch} x {seconds:g} s, padding: {padding}")


FULL_GRID = Grid()


@dataclass
class Agreement:
    """How far a candidate is from the trained model, over batches."""

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
            self.largest_difference, self.where = float("inf"), f"{where}: other lengths"
            self.utterances_with_other_tokens += len(expected.lengths)
            return
        for trained, written in zip(_utterances(expected), _utterances(actual), strict=True):
            differs = best_tokens(trained, blank) != best_tokens(written, blank)
            self.utterances_with_other_tokens += differs
            difference = float(np.abs(trained - written).max(initial=0))
            if not difference <= self.largest_difference:  # NaN is not, either
                self.largest_difference, self.where = difference, where


@dataclass
class Comparison:
    """A candidate beside the trained model of a bundle: on the grid, and on test clips.

    Attributes:
        errors, trained_errors: in the transcripts of both.
        other_words: the number of transcripts with other words.
        failure: what the candidate raised; it does not run again.
    """

    candidate: Candidate
    bundle: Bundle
    grid: Agreement = field(default_factory=Agreement)
    clips: Agreement = field(default_factory=Agreement)
    errors: Scores = field(default_factory=Scores)
    trained_errors: Scores = field(default_factory=Scores)
    other_words: int = 0
    failure: str = ""

    def add(self, case: Case, expected: BatchLogProbs) -> None:
        """Run the candidate on a batch, and compare it with the output of the trained model."""
        if self.failure:
            return
        try:
            actual = self.candidate.log_probs(case.audio, case.lengths)
        except Exception as error:  # as the graph of an LSTM does at other lengths
            self.failure = describe_failure(case.description, error)
            return
        agreement = self.clips if case.rows else self.grid
        agreement.add(expected, actual, blank=self.bundle.blank, where=case.description)
        if case.rows and self.bundle.labels is not None:
            self._score(case, expected, actual)

    def _score(self, case: Case, expected: BatchLogProbs, actual: BatchLogProbs) -> None:
        if self.candidate.transcribe is None:
            texts = self._texts(actual)
        else:
            clips = zip(case.audio, case.lengths, strict=True)
            texts = self.candidate.transcribe([clip[:length] for clip, length in clips])
        for row, text, trained in zip(case.rows, texts, self._texts(expected), strict=True):
            self.errors += count_errors(row["text"], text)
            self.trained_errors += count_errors(row["text"], trained)
            self.other_words += text.split() != trained.split()

    def _texts(self, output: BatchLogProbs) -> list[str]:
        """Decode as the candidate does, given only log-probabilities."""
        tokenizer, decoder = self.bundle.tokenizer, self.bundle.decoder
        if self.candidate.decoder == GREEDY or decoder is None:
            blank = tokenizer.vocabulary.blank
            return [tokenizer.decode(best_tokens(clip, blank)) for clip in _utterances(output)]
        return [
            tokenizer.decode(list(decoder.nbest(clip)[0].tokens)) for clip in _utterances(output)
        ]

    def reasons(self) -> list[str]:
        """Return the limits that are missed, a sentence each."""
        if self.failure:
            return [self.failure]
        reasons = []
        for agreement in (self.grid, self.clips) if self.candidate.is_exact else ():
            worst, differing = agreement.largest_difference, agreement.utterances_with_other_tokens
            if not worst <= MAX_DIFFERENCE:
                reasons.append(
                    f"log-probabilities differ by {worst:.1e} ({agreement.where}); at most "
                    f"{MAX_DIFFERENCE:.0e} is allowed"
                )
            if differing:
                reasons.append(
                    f"{differing} of {agreement.utterances} utterances have other tokens"
                )
        name, rate, trained_rate = ("WER", self.errors.wer, self.trained_errors.wer)
        if not self.bundle.config.has_words:
            name, rate, trained_rate = ("CER", self.errors.cer, self.trained_errors.cer)
        if abs(rate - trained_rate) > MAX_WER_DIFFERENCE:
            reasons.append(
                f"{name} is {100 * rate:.2f} %, the trained model's is {100 * trained_rate:.2f} %; "
                f"they may differ by {100 * MAX_WER_DIFFERENCE:g} points"
            )
        if not self.candidate.is_exact and not self.clips.utterances:
            reasons.append(
                "error rates can only be compared on the run's test sets, which are gone"
            )
        return reasons

    def report(self, grid: Grid, test_sets: TestSets | str) -> dict[str, Any]:
        """Return the parity report; ``test_sets`` may be the reason why there are none."""
        reasons = self.reasons()
        figures = partial(error_figures, by_words=self.bundle.config.has_words)
        return {
            "written": not reasons,
            "reasons": reasons,
            "limits": self.candidate.limits,
            "grid": {
                "batch": grid.batches,
                "seconds": grid.seconds,
                "padding": PADDINGS,
                **asdict(self.grid),
            },
            "test_sets": {"not_compared": test_sets}
            if isinstance(test_sets, str)
            else {
                "sets": {name: len(rows) for name, rows in test_sets.items()},
                **asdict(self.clips),
                "decoder": self.candidate.decoder,
                "transcripts_with_other_words": self.other_words,
                "error_rates": figures(self.errors),
                "error_rates_of_the_trained_model": figures(self.trained_errors),
            },
        }


def describe_failure(batch: str, error: Exception) -> str:
    """Say on what a format failed; runtimes have exceptions of their own."""
    return f"on {batch} it raised {type(error).__name__}: {printable(str(error))[:300]}"


def compare(
    trained: TrainedModel, candidates: Sequence[Candidate], grid: Grid, test_sets: TestSets | str
) -> list[Comparison]:
    """Run every candidate and the trained model on the same audio."""
    comparisons = [Comparison(candidate, trained.bundle) for candidate in candidates]
    for case in cases(grid, test_sets, trained.bundle.config.sample_rate):
        with naming_audio(case.description):
            expected = trained_log_probs(trained.waveform, case.audio, case.lengths)
        for comparison in comparisons:
            if (prepare := comparison.candidate.prepare) is None:
                comparison.add(case, expected)
                continue
            prepared = prepare(case)
            comparison.add(
                prepared, trained_log_probs(trained.waveform, prepared.audio, prepared.lengths)
            )
    return comparisons


def cases(grid: Grid, test_sets: TestSets | str, rate: int) -> Iterator[Case]:
    """Yield the batches of the grid, then those of the test clips; show the progress."""
    sets = [] if isinstance(test_sets, str) else [*test_sets.values()]
    batches = (batch for rows in sets for batch in read_whole_clips(rows, rate))
    test_cases = (Case.of_clips([*batch.values()]) for batch in batches)
    clips = sum(batch for batch, *_ in grid.combinations) + sum(map(len, sets))
    with progress_bar("comparing with the trained model", clips) as advance:
        for case in chain(grid.cases(rate), test_cases):
            yield case
            advance(len(case.lengths))


def _utterances(output: BatchLogProbs) -> list[Float32s]:
    pairs = zip(output.log_probs, output.lengths.tolist(), strict=True)
    return [log_probs[:frames] for log_probs, frames in pairs]
