"""Compare written formats with the trained model; the reports are parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format is compared on noise, on a grid of batch x length x padding, and where the run's test
sets are there, on all of their clips: log-probabilities, best tokens, and error rates beside those
of the trained model.
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
from sbkit.decoding.confidence import GREEDY
from sbkit.decoding.greedy import best_tokens
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.evaluate.wer_report import error_figures
from sbkit.export.held_out import read_whole_clips
from sbkit.export.traced import TrainedModel, trained_log_probs
from sbkit.logs.progress import shown
from sbkit.runtime.model import naming_audio
from sbkit.runtime.onnx_model import BatchLogProbs

HeldOut = Mapping[str, datasets.Dataset]
Run = Callable[
    [Float32s, Counts], BatchLogProbs
]  # of audio (B, S) between -1 and 1, and lengths (B,)
PADDINGS = ("none", "ragged", "beyond")
MORE = 1.0  # seconds past the longest, in "beyond", and a sample: no round number
DIFFERENCE = 1e-4  # of log-probabilities, of a format that computes in float32
WORD_ERROR_RATE = 0.01  # difference on held-out clips; CER in a language without words


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A written format, or one of its precisions, as whoever uses it would run it.

    name: within its format; files: what is removed where it misses its limits; log_probs: runs it;
    is_exact: whether log-probabilities and tokens must be those of the trained model, not error
    rates alone; transcribe: clips (S,) of such audio, where its user has a decoder of its own;
    decoder: the bundle's that this one is to be like; prepare: what it needs
    done to audio first, also for the trained model.
    """

    name: str
    files: Sequence[str]
    log_probs: Run
    is_exact: bool = True
    transcribe: Callable[[Sequence[Float32s]], list[str]] | None = None
    decoder: str = GREEDY
    prepare: Callable[["Case"], "Case"] | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """Return how far it may be from the trained model."""
        exact = {"difference": DIFFERENCE, "same_tokens": True} if self.is_exact else {}
        return {**exact, "word_error_rate": WORD_ERROR_RATE}


@dataclass(frozen=True)
class Case:
    """One batch: audio (B, S) between -1 and 1, zero past its lengths (B,), and what it is.

    rows: what is known of each utterance, where these are held-out clips.
    """

    audio: Float32s
    lengths: Counts
    what: str
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Grid:
    """Batch sizes and lengths in seconds, with each way of padding rows.

    none: all rows are as long; ragged: each is shorter than the one before; beyond: ragged, and a
    second more of zeros than the longest has.
    """

    batches: tuple[int, ...] = (1, 2, 5)
    seconds: tuple[float, ...] = (0.3, 2.0, 10.0, 40.0)

    @property
    def combinations(self) -> list[tuple[int, float, str]]:
        """Return all batch sizes, lengths and ways of padding; one clip cannot be ragged."""
        combinations = product(self.batches, self.seconds, PADDINGS)
        return [(b, s, padding) for b, s, padding in combinations if b > 1 or padding != "ragged"]

    def cases(self, sample_rate: int) -> Iterator[Case]:
        """Yield every combination, filled with noise that grows and fades four times a second."""
        random = np.random.default_rng(0)
        for batch, seconds, padding in self.combinations:
            longest = seconds_to_samples(seconds, sample_rate)
            shares = np.linspace(1.0, 0.4, batch) if padding != "none" else np.ones(batch)
            lengths = (longest * shares).astype(np.int64)
            more = seconds_to_samples(MORE, sample_rate) + 1 if padding == "beyond" else 0
            audio = np.zeros((batch, longest + more), np.float32)
            for row, length in zip(audio, lengths, strict=True):
                loudness = 0.05 + 0.05 * np.sin(np.arange(length) * (8 * np.pi / sample_rate))
                row[:length] = loudness * random.standard_normal(length)
            yield Case(audio, lengths, f"{batch} x {seconds:g} s, padding: {padding}")


WHOLE = Grid()


def _held_out_case(rows: Sequence[Mapping[str, Any]]) -> Case:
    lengths = np.array([len(each["audio"]) for each in rows], np.int64)
    audio = np.zeros((len(rows), lengths.max()), np.float32)
    for row, length, each in zip(audio, lengths, rows, strict=True):
        row[:length] = each["audio"] / np.float32(FULL_SCALE)
    return Case(audio, lengths, f"{len(rows)} held-out clips", rows)


@dataclass
class Agreement:
    """What a candidate and the trained model have in common, added up over batches."""

    largest_difference: float = 0.0
    where: str = ""
    utterances: int = 0
    utterances_with_other_tokens: int = 0

    def add(self, expected: BatchLogProbs, found: BatchLogProbs, *, blank: int, what: str) -> None:
        """Compare a batch; other lengths are an infinite difference."""
        self.utterances += len(expected.lengths)
        if not np.array_equal(expected.lengths, found.lengths):
            self.largest_difference, self.where = float("inf"), f"{what}: other lengths"
            self.utterances_with_other_tokens += len(expected.lengths)
            return
        for one, two in zip(_rows(expected), _rows(found), strict=True):
            other = best_tokens(one, blank) != best_tokens(two, blank)
            self.utterances_with_other_tokens += other
            difference = float(np.abs(one - two).max(initial=0))
            if not difference <= self.largest_difference:  # NaN is none, either
                self.largest_difference, self.where = difference, what


@dataclass
class Comparison:
    """A candidate beside the trained model of a bundle: on the grid, and on held-out clips.

    errors, trained: of the transcripts of both; other_words: transcripts that are others; failure:
    what the candidate raised, after which it is asked no more.
    """

    candidate: Candidate
    bundle: Bundle
    grid: Agreement = field(default_factory=Agreement)
    clips: Agreement = field(default_factory=Agreement)
    errors: Scores = field(default_factory=Scores)
    trained: Scores = field(default_factory=Scores)
    other_words: int = 0
    failure: str = ""

    def add(self, case: Case, expected: BatchLogProbs) -> None:
        """Run the candidate on a batch, and compare it with what the trained model computes."""
        if self.failure:
            return
        try:
            found = self.candidate.log_probs(case.audio, case.lengths)
        except Exception as error:  # as the graph of an LSTM does at other lengths
            reason = f"{type(error).__name__}: {printable(str(error))[:300]}"
            self.failure = f"it must run on {case.what}, but raised {reason}"
            return
        agreement = self.clips if case.rows else self.grid
        agreement.add(expected, found, blank=self.bundle.blank, what=case.what)
        if case.rows and self.bundle.labels is not None:
            self._score(case, expected, found)

    def _score(self, case: Case, expected: BatchLogProbs, found: BatchLogProbs) -> None:
        candidate = self.candidate
        if candidate.transcribe is None:
            ours = self._texts(found)
        else:
            pairs = zip(case.audio, case.lengths, strict=True)
            ours = candidate.transcribe([row[:length] for row, length in pairs])
        for row, one, two in zip(case.rows, ours, self._texts(expected), strict=True):
            self.errors += count_errors(row["text"], one)
            self.trained += count_errors(row["text"], two)
            self.other_words += one.split() != two.split()

    def _texts(self, found: BatchLogProbs) -> list[str]:
        """Decode as the candidate is to, given log-probabilities alone."""
        tokenizer, decoder = self.bundle.tokenizer, self.bundle.decoder
        if self.candidate.decoder == GREEDY or decoder is None:
            blank = tokenizer.vocabulary.blank
            return [tokenizer.decode(best_tokens(row, blank)) for row in _rows(found)]
        return [tokenizer.decode(list(decoder.nbest(row)[0].tokens)) for row in _rows(found)]

    def reasons(self) -> list[str]:
        """Return the limits that are missed, a sentence each."""
        if self.failure:
            return [self.failure]
        found = []
        for agreement in (self.grid, self.clips) if self.candidate.is_exact else ():
            worst, others = agreement.largest_difference, agreement.utterances_with_other_tokens
            if not worst <= DIFFERENCE:
                found.append(
                    f"log-probabilities differ by {worst:.1e} where at most {DIFFERENCE:.0e} is "
                    f"allowed ({agreement.where})"
                )
            if others:
                found.append(f"{others} of {agreement.utterances} utterances have other tokens")
        name, ours, theirs = ("WER", self.errors.wer, self.trained.wer)
        if not self.bundle.config.has_words:
            name, ours, theirs = ("CER", self.errors.cer, self.trained.cer)
        if abs(ours - theirs) > WORD_ERROR_RATE:
            found.append(
                f"{name} is {100 * ours:.2f} % where the trained model has {100 * theirs:.2f} %, "
                f"and {100 * WORD_ERROR_RATE:g} points are allowed"
            )
        if not self.candidate.is_exact and not self.clips.utterances:
            found.append("error rates can only be compared on the run's test sets, which are gone")
        return found

    def report(self, grid: Grid, held_out: HeldOut | str) -> dict[str, Any]:
        """Return what was found as plain data; ``held_out`` may be why there are no clips."""
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
            "held_out": {"not_compared": held_out}
            if isinstance(held_out, str)
            else {
                "sets": {name: len(rows) for name, rows in held_out.items()},
                **asdict(self.clips),
                "decoder": self.candidate.decoder,
                "transcripts_with_other_words": self.other_words,
                "error_rates": figures(self.errors),
                "error_rates_of_the_trained_model": figures(self.trained),
            },
        }


def compare(
    trained: TrainedModel, candidates: Sequence[Candidate], grid: Grid, held_out: HeldOut | str
) -> list[Comparison]:
    """Run every candidate and the trained model on the same audio."""
    compared = [Comparison(each, trained.bundle) for each in candidates]
    for case in cases(grid, held_out, trained.bundle.config.sample_rate):
        with naming_audio(case.what):
            expected = trained_log_probs(trained.waveform, case.audio, case.lengths)
        for each in compared:
            if (prepare := each.candidate.prepare) is None:
                each.add(case, expected)
                continue
            other = prepare(case)
            each.add(other, trained_log_probs(trained.waveform, other.audio, other.lengths))
    return compared


def cases(grid: Grid, held_out: HeldOut | str, rate: int) -> Iterator[Case]:
    """Yield the batches of the grid, and those of the held-out clips; show the progress."""
    sets = [] if isinstance(held_out, str) else [*held_out.values()]
    batches = (batch for rows in sets for batch in read_whole_clips(rows, rate))
    held_out_cases = (_held_out_case([*batch.values()]) for batch in batches)
    clips = sum(batch for batch, *_ in grid.combinations) + sum(map(len, sets))
    with shown("comparing with the trained model", clips) as advance:
        for case in chain(grid.cases(rate), held_out_cases):
            yield case
            advance(len(case.lengths))


def _rows(found: BatchLogProbs) -> list[Float32s]:
    pairs = zip(found.log_probs, found.lengths.tolist(), strict=True)
    return [row[:frames] for row, frames in pairs]
