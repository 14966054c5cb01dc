"""Compare written formats with the trained model, and certify what was found: parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format is compared on a grid of batch x length x padding, and where the run's test sets are
there, on all of their clips: log-probabilities, best tokens, and error rates beside those of the
trained model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.base.text import printable
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.decoding.confidence import GREEDY
from sbkit.decoding.greedy import best_tokens
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.evaluate.wer_report import error_figures
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.formats.held_out import HeldOut, WholeClips
from sbkit.inference.formats.traced import TrainedModel, trained_log_probs
from sbkit.inference.runtime.model import naming_audio
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs

SPEECH_SECONDS = 60  # of the held-out clips that the grid is cut from
PADDINGS = ("none", "ragged", "beyond")
MORE = 1.0  # seconds past the longest, in "beyond"
NOISE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a format may be from the trained model; None where there is no limit.

    difference: of log-probabilities; same_tokens: of greedy decoding; word_error_rate: difference
    on held-out clips, as a fraction, in a language without words that of characters; frames: the
    least share of frames with the same best token, where there are no such clips.
    """

    difference: float | None = None
    same_tokens: bool = False
    word_error_rate: float | None = None
    frames: float | None = None


WORD_ERROR_RATE = 0.01
EXACT = Limits(difference=1e-4, same_tokens=True)
QUANTIZED = Limits(word_error_rate=WORD_ERROR_RATE, frames=0.99)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A written format, or one of its precisions, as whoever uses it would run it.

    name: within its format; files: what is removed where it misses its limits; log_probs: of audio
    (B, S) between -1 and 1 and lengths (B,); transcribe: clips (S,) of such audio, where its user
    has a decoder of its own; decoder: the bundle's that this one is to be like.
    """

    name: str
    files: Sequence[str]
    limits: Limits
    log_probs: Callable[[Floats, Counts], LogProbs]
    transcribe: Callable[[Sequence[Floats]], list[str]] | None = None
    decoder: str = GREEDY


@dataclass(frozen=True)
class Case:
    """One batch: audio (B, S) between -1 and 1, zero past its lengths (B,), and what it is."""

    audio: Floats
    lengths: Counts
    what: str


@dataclass(frozen=True)
class Grid:
    """Batch sizes, lengths in seconds, and how rows are padded.

    none: all rows are as long; ragged: each is shorter than the one before; beyond: ragged, and a
    second more of zeros than the longest has.
    """

    batches: tuple[int, ...] = (1, 2, 5)
    seconds: tuple[float, ...] = (0.3, 2.0, 10.0, 40.0)
    paddings: tuple[str, ...] = PADDINGS

    def cases(self, speech: Floats, sample_rate: int) -> Iterator[Case]:
        """Cut the cases out of speech (S,), which is repeated as often as it takes."""
        for batch in self.batches:
            for seconds in self.seconds:
                for padding in self.paddings:
                    if padding != "ragged" or batch > 1:
                        yield _case(speech, batch, seconds, padding, sample_rate)


def _case(speech: Floats, batch: int, seconds: float, padding: str, rate: int) -> Case:
    longest = seconds_to_samples(seconds, rate)
    shares = np.linspace(1.0, 0.4, batch) if padding != "none" else np.ones(batch)
    lengths = (longest * shares).astype(np.int64)
    more = seconds_to_samples(MORE, rate) + 1 if padding == "beyond" else 0  # of no round number
    audio = np.zeros((batch, longest + more), np.float32)
    for row, length in enumerate(lengths):
        begin = row * len(speech) // batch
        audio[row, :length] = np.take(speech, np.arange(begin, begin + length), mode="wrap")
    what = f"{batch} x {samples_to_seconds(longest, rate):g} s, padding: {padding}"
    return Case(audio, lengths, what)


def noise(sample_rate: int) -> Floats:
    """Make noise that grows and fades four times a second, where there is no speech: (S,)."""
    count = seconds_to_samples(NOISE_SECONDS, sample_rate)
    loudness = 0.5 + 0.5 * np.sin(np.arange(count) * (8 * np.pi / sample_rate))
    drawn = np.random.default_rng(0).standard_normal(count) * loudness
    made: Floats = (0.1 * drawn).clip(-1, 1).astype(np.float32)
    return made


@dataclass
class Agreement:
    """What a candidate and the trained model have in common, added up over batches."""

    largest_difference: float = 0.0
    where: str = ""
    utterances: int = 0
    utterances_with_other_tokens: int = 0
    frames: int = 0
    frames_with_the_same_best_token: int = 0

    def add(self, expected: LogProbs, found: LogProbs, *, blank: int, what: str) -> None:
        """Compare a batch; other lengths are an infinite difference."""
        self.utterances += len(expected.lengths)
        if not np.array_equal(expected.lengths, found.lengths):
            self.largest_difference, self.where = float("inf"), f"{what}: other lengths"
            self.utterances_with_other_tokens += len(expected.lengths)
            return
        self.utterances_with_other_tokens += sum(
            one != two
            for one, two in zip(tokens(expected, blank), tokens(found, blank), strict=True)
        )
        for row, length in enumerate(expected.lengths):
            one, two = expected.log_probs[row, :length], found.log_probs[row, :length]
            self.frames += int(length)
            self.frames_with_the_same_best_token += int((one.argmax(-1) == two.argmax(-1)).sum())
            difference = float(np.abs(one - two).max(initial=0))
            if not difference <= self.largest_difference:  # NaN is none, either
                self.largest_difference, self.where = difference, what


@dataclass
class Comparison:
    """A candidate beside the trained model: on the grid, and on held-out clips.

    by_words: false for a language that writes no spaces between words, whose CER is compared;
    errors, trained: by decoder; other_words: transcripts that are others; failure: what the
    candidate raised, after which it is asked no more.
    """

    candidate: Candidate
    by_words: bool = True
    grid: Agreement = field(default_factory=Agreement)
    clips: Agreement = field(default_factory=Agreement)
    errors: dict[str, Scores] = field(default_factory=dict)
    trained: dict[str, Scores] = field(default_factory=dict)
    other_words: int = 0
    failure: str = ""

    def run(self, audio: Floats, lengths: Counts, what: str) -> LogProbs | None:
        """Run the candidate; None where it fails, as the graph of an LSTM does at other lengths."""
        if self.failure:
            return None
        try:
            return self.candidate.log_probs(audio, lengths)
        except Exception as error:  # a runtime, or a user's part in it, may raise anything
            reason = f"{type(error).__name__}: {printable(str(error))[:300]}"
            self.failure = f"it must run on {what}, but raised {reason}"
            return None

    def reasons(self) -> list[str]:
        """Return the limits that are missed, a sentence each."""
        if self.failure:
            return [self.failure]
        limits, found = self.candidate.limits, []
        for agreement in (self.grid, self.clips):
            worst = agreement.largest_difference
            if limits.difference is not None and not worst <= limits.difference:
                found.append(
                    f"log-probabilities differ by {worst:.1e} where at most "
                    f"{limits.difference:.0e} is allowed ({agreement.where})"
                )
            if limits.same_tokens and agreement.utterances_with_other_tokens:
                others = agreement.utterances_with_other_tokens
                found.append(f"{others} of {agreement.utterances} utterances have other tokens")
        return found + (self._other_rates(limits) if self.errors else self._other_frames(limits))

    def _other_rates(self, limits: Limits) -> list[str]:
        allowed, name = limits.word_error_rate, "WER" if self.by_words else "CER"
        return [
            f"{name} ({decoder}) is {100 * self._rate(scores):.2f} % where the trained model has "
            f"{100 * self._rate(self.trained[decoder]):.2f} %, and {100 * allowed:g} points are "
            "allowed"
            for decoder, scores in self.errors.items()
            if allowed is not None
            and abs(self._rate(scores) - self._rate(self.trained[decoder])) > allowed
        ]

    def _rate(self, scores: Scores) -> float:
        return scores.wer if self.by_words else scores.cer

    def _other_frames(self, limits: Limits) -> list[str]:
        share = self.grid.frames_with_the_same_best_token / max(1, self.grid.frames)
        if limits.frames is None or share >= limits.frames:
            return []
        return [
            f"{100 * share:.1f} % of frames have the same best token where {100 * limits.frames:g} "
            "% must, as there are no held-out clips"
        ]


def compare(
    trained: TrainedModel, candidates: Sequence[Candidate], grid: Grid, held_out: HeldOut | None
) -> list[Comparison]:
    """Run every candidate and the trained model on the same audio."""
    bundle = trained.bundle
    compared = [Comparison(each, bundle.config.has_words) for each in candidates]
    run_trained = partial(trained_log_probs, trained.waveform)
    blank, rate = bundle.tokenizer.vocabulary.blank, bundle.config.sample_rate
    for case in grid.cases(_speech(held_out, rate), rate):
        with naming_audio(case.what):
            expected = run_trained(case.audio, case.lengths)
        for each in compared:
            found = each.run(case.audio, case.lengths, case.what)
            if found is not None:
                each.grid.add(expected, found, blank=blank, what=case.what)
    for clips in held_out.batches() if held_out else ():
        audio, lengths = _as_batch(clips)
        what = f"{len(audio)} held-out clips"
        with naming_audio(what):
            expected = run_trained(audio, lengths)
        hypotheses = _texts(bundle, expected)
        for each in compared:
            found = each.run(audio, lengths, what)
            if found is not None:
                each.clips.add(expected, found, blank=blank, what=what)
                _score(each, bundle, clips, hypotheses, found)
    return compared


def certificate(compared: Comparison, grid: Grid, held_out: HeldOut | str) -> dict[str, Any]:
    """Return what a comparison found as plain data; ``held_out`` may be why there is none."""
    reasons = compared.reasons()
    limits = {name: value for name, value in vars(compared.candidate.limits).items() if value}
    figures: dict[str, Any] = {
        "written": not reasons,
        "reasons": reasons,
        "limits": limits,
        "grid": {
            "batch": grid.batches,
            "seconds": grid.seconds,
            "padding": grid.paddings,
            "audio": "noise" if isinstance(held_out, str) else "held-out clips",
            **asdict(compared.grid),
        },
    }
    if isinstance(held_out, str):
        return figures | {"held_out": {"not_compared": held_out}}
    return figures | {
        "held_out": {
            "sets": {name: len(rows) for name, rows in held_out.sets.items()},
            **asdict(compared.clips),
            "transcripts_with_other_words": compared.other_words,
            "error_rates": _rates(compared.errors, compared),
            "error_rates_of_the_trained_model": _rates(compared.trained, compared),
        }
    }


def tokens(found: LogProbs, blank: int) -> list[list[int]]:
    """Decode greedily."""
    return [best_tokens(row, blank) for row in _rows(found)]


def _rows(found: LogProbs) -> list[Floats]:
    pairs = zip(found.log_probs, found.lengths.tolist(), strict=True)
    return [row[:frames] for row, frames in pairs]


def _texts(bundle: Bundle, found: LogProbs) -> dict[str, list[str]]:
    """Decode greedily, and with the bundle's own decoder, given log-probabilities alone."""
    tokenizer, decoder = bundle.tokenizer, bundle.decoder
    best = {"greedy": tokens(found, tokenizer.vocabulary.blank)}
    if decoder is not None:
        name = decoder.kind
        if decoder.attention is not None:
            name, decoder = f"{name} of CTC alone", decoder.with_attention(None)
        best[name] = [list(decoder.nbest(row)[0].tokens) for row in _rows(found)]
    return {name: [tokenizer.decode(ids) for ids in each] for name, each in best.items()}


def _score(
    compared: Comparison,
    bundle: Bundle,
    clips: WholeClips,
    trained: Mapping[str, list[str]],
    found: LogProbs,
) -> None:
    """Add the errors of a batch; a format with a decoder of its own is scored by that alone."""
    transcribe = compared.candidate.transcribe
    if transcribe is None:
        texts = _texts(bundle, found)
    else:
        texts = {compared.candidate.decoder: transcribe([_scaled(each) for each in clips.audio])}
    for decoder, hypotheses in texts.items():
        for scores, heard in (
            (compared.errors, hypotheses),
            (compared.trained, trained[decoder]),
        ):
            pairs = zip(clips.rows, heard, strict=True)
            more = sum((count_errors(row["text"], text) for row, text in pairs), Scores())
            scores[decoder] = scores.get(decoder, Scores()) + more
    own = compared.candidate.decoder
    compared.other_words += sum(
        one.split() != two.split() for one, two in zip(texts[own], trained[own], strict=True)
    )


def _rates(errors: Mapping[str, Scores], of: Comparison) -> dict[str, Any]:
    return {
        decoder: error_figures(scores, by_words=of.by_words) for decoder, scores in errors.items()
    }


def _as_batch(clips: WholeClips) -> tuple[Floats, Counts]:
    lengths = np.array([len(each) for each in clips.audio], np.int64)
    audio = np.zeros((len(lengths), lengths.max()), np.float32)
    for row, each in enumerate(clips.audio):
        audio[row, : len(each)] = _scaled(each)
    return audio, lengths


def _scaled(samples: Any) -> Floats:
    scaled: Floats = samples.astype(np.float32) / np.float32(FULL_SCALE)
    return scaled


def _speech(held_out: HeldOut | None, rate: int) -> Floats:
    """Join held-out clips, a minute at most; noise where there are none."""
    found: list[Floats] = []
    for clips in held_out.batches() if held_out else ():
        found += [_scaled(each) for each in clips.audio]
        if sum(map(len, found)) > SPEECH_SECONDS * rate:
            break
    return np.concatenate(found)[: SPEECH_SECONDS * rate] if found else noise(rate)
