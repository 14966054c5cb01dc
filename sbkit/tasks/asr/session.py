"""Sessions of streaming speech: samples in, events out, with growing text and timed words.

Audio arrives in blocks of any size, and runs through the model in chunks. The model has a thread of
its own and may use any runtime; this file imports none.

Legend: S samples, U frames, V vocabulary, W words of an utterance.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from sbkit.audio.io import Samples, to_samples
from sbkit.audio.segments import tail_samples
from sbkit.base.arrays import Float64s, LogProbs
from sbkit.base.errors import BundleError, SbkitError
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import Decoder
from sbkit.decoding.greedy import Hypothesis
from sbkit.evaluate.wer import word_correctness
from sbkit.runtime.model_thread import ModelThread, ReopenedWhenUnpickled
from sbkit.runtime.runtimes import load_in_thread
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer
from sbkit.tasks.vad.predict import SpeechEvent, VoiceDetector
from sbkit.text.recognized_word import Word
from sbkit.text.tokenizer import SPACE

CUT_SECONDS = 4.0  # before the limit; what follows the cut is decoded again
# A word is stable if hypotheses with this share of the beam's probability agree on it.
STABLE_SHARE = 0.95
Rule = Literal["nothing", "silence", "longest"]


@dataclass(frozen=True, kw_only=True)
class EndpointRules:
    """When an utterance ends, in seconds.

    A frame is silent if its best token is the blank or a space. The rules are those of Kaldi
    (`online2/online-endpoint.h`), with the numbers of sherpa-onnx.

    initial_silence: silence that ends an utterance without words; its rule is "nothing".
    silence: silence after words that ends an utterance; its rule is "silence".
    max_utterance: the length at which any utterance is cut, in the longest gap between two words,
        or else two tokens, of its last CUT_SECONDS; its rule is "longest".
    ends_turns: whether silence ends turns; if not, ``max_utterance`` is the length of a turn.

    >>> EndpointRules().matching_rule(is_spoken=True, silence=1.3, seconds=4.0)
    'silence'
    """

    initial_silence: float = 2.4
    silence: float = 1.2
    max_utterance: float = 20.0
    ends_turns: bool = True

    def matching_rule(self, *, is_spoken: bool, silence: float, seconds: float) -> Rule | None:
        """Return the rule that ends an utterance, or None if it goes on.

        is_spoken: whether the utterance has words; silence: the seconds of silence at its end.
        seconds: the length of the utterance, or of its turn.
        """
        if is_spoken and silence >= self.silence:
            return "silence"
        if not is_spoken and silence >= self.initial_silence:
            return "nothing"
        return "longest" if seconds >= self.max_utterance else None


DEFAULT_RULES = EndpointRules()


class StreamingRecognizer(ReopenedWhenUnpickled):
    """A streaming model with its decoder, for any number of sessions; `load` opens a bundle.

    decoder, aligner: decode, and time the words.
    initial_state: the model's state before the first sample of a session.
    """

    def __init__(self, *, bundle: AsrBundle[ModelThread]) -> None:
        """Use an open bundle; raises BundleError if it only takes whole clips."""
        bundle.task.require_frames("Live speech")
        self.model = bundle.model
        self.runs_on = bundle.model.runs_on
        self.sample_rate = bundle.config.sample_rate
        chunks = self.model.chunks
        if chunks is None:
            raise BundleError(
                f"This model, run by {self.runs_on.runtime}, only takes whole clips. For live "
                "speech, train hparams/ctc_streaming.yaml."
            )
        self.chunks = chunks
        self.samples_per_frame = self.model.samples_per_frame
        self.aligner = bundle.decoder_pool.decoder.aligner
        self.silent_token_ids = bundle.tokenizer.silent_ids
        texts = bundle.tokenizer.texts
        self.word_starts = [id for id, text in enumerate(texts) if text.startswith(SPACE)]
        decoder = bundle.decoder_pool.decoder.decoder
        if isinstance(decoder, BeamDecoder) and decoder.attention_rescoring:
            raise BundleError(
                "The decoder rescores with the attention decoder, which takes whole clips. Choose "
                "the decoder greedy, or run `sbkit tune RUN --no-attention-rescoring --out NEW`."
            )
        self.decoder: Decoder = decoder
        self.initial_state = self.model.start()

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> Self:
        """Load a bundle, with the options of `Transcriber.load` except ``times``."""
        return cls(bundle=as_recognizer(load_in_thread(folder, streaming="only", **options)))

    def close(self) -> None:
        self.model.close()


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a session.

    seconds: the end of the chunk that the event comes from, in the time of the stream. At least
        this much audio was received when the event was emitted.
    """

    seconds: float

    def plain(self) -> dict[str, object]:
        """Return plain data, for JSON; ``event`` is the name of the class."""
        plain: dict[str, object] = {"event": type(self).__name__.lower()}
        for name, value in asdict(self).items():
            plain[name] = round(value, 3) if isinstance(value, float) else value
        return plain


@dataclass(frozen=True, kw_only=True)
class Partial(Event):
    """The text of an utterance so far."""

    text: str
    stable: int  # the number of leading words that will hardly change


@dataclass(frozen=True, kw_only=True)
class Endpoint(Event):
    """An utterance has ended."""

    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Final(Event):
    """The text of an utterance and its timed words."""

    text: str
    start: float  # in seconds of the stream
    end: float
    words: tuple[Word, ...]

    def plain(self) -> dict[str, object]:
        return {**super().plain(), "words": [word.plain() for word in self.words]}


@dataclass
class Utterance:
    """The state of an utterance until it ends."""

    first_frame: int  # its index in the session
    decoder_state: Any
    log_probs: list[LogProbs] = field(default_factory=list)  # (U, V) of its chunks so far
    num_frames: int = 0  # decoded so far
    silent_frames: int = 0  # since the last frame with a token
    has_space: bool = False  # whether a space is in them
    is_spoken: bool = False  # whether any frame had a token
    longest_gap: tuple[bool, int] = (False, 0)  # near the limit: if it is between words, frames
    cut_frame: int = 0  # the middle of the gap
    cut_beam: Sequence[Hypothesis] = ()  # at its end, since a decoder does not go back
    last_partial: str = ""  # the text of the last `Partial`


class Session:
    """One stream of speech: `push` samples as they arrive, and `finish` it.

    `feed` and `advance_batch` run several sessions of one recognizer as one batch. The events do
    not depend on how the audio is cut into blocks.

    >>> recognizer = StreamingRecognizer.load("my-model")  # doctest: +SKIP
    >>> session = Session(recognizer)  # doctest: +SKIP
    >>> session.push(samples) + session.finish()  # doctest: +SKIP
    [Partial(seconds=0.665, text='hel', stable=0), Final(seconds=1.2, text='hello', ...)]
    """

    def __init__(
        self,
        recognizer: StreamingRecognizer,
        endpoint_rules: EndpointRules = DEFAULT_RULES,
        *,
        offset: int = 0,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Begin a session.

        endpoint_rules: when an utterance ends.
        offset: the samples of the stream before this session. The times of events count from the
            start of the stream.
        detector: detects silence; by default, frames without a token are silent.
        """
        self.recognizer = recognizer
        self.model_state = recognizer.initial_state
        self._rules = endpoint_rules
        self._offset = offset
        self._detector = detector
        self._speech_events: tuple[SpeechEvent, ...] = ()
        if detector is not None:
            detector.require_rate(recognizer.sample_rate)
            self._detector_state = detector.start()
        self.is_finished = False  # whether the stream has ended; `feed` takes no more samples
        self._is_decoded = False  # whether a finished session has returned its last events
        self.pending = np.zeros(0, np.int16)  # samples from the start of the next chunk on
        self._num_samples = 0  # received
        self._num_chunks = 0  # decoded
        self._turn_start = 0  # the frame that `max_utterance` counts from
        self.utterance = Utterance(0, self._decoder.start())

    def push(self, samples: Samples) -> list[Event]:
        """Take samples at the recognizer's rate, and return the new events; see `feed`."""
        self.feed(samples)
        return self._advance()

    def finish(self) -> list[Event]:
        """End the stream, and return its last events."""
        self.is_finished = True
        return self._advance()

    def feed(self, samples: Samples) -> None:
        """Add samples, in any form that `to_samples` takes, for the next `advance_batch`."""
        if self.is_finished:
            raise SbkitError("This session is finished and takes no more samples; begin another.")
        samples = to_samples(samples, is_live=True)
        self.pending = np.append(self.pending, samples)
        self._num_samples += len(samples)
        if self._detector is not None:
            events, self._detector_state = self._detector.push(samples, self._detector_state)
            self._speech_events += tuple(events)

    @property
    def has_work(self) -> bool:
        """Whether `advance_batch` has anything to do for this session."""
        if self.is_finished:
            return not self._is_decoded
        return len(self.pending) >= self.recognizer.chunks.window

    def decode_chunks(self, chunks: Sequence[LogProbs]) -> list[Event]:
        """Decode more chunks (U, V), and end the utterance if the session is finished."""
        events: list[Event] = []
        for log_probs in chunks:
            self._num_chunks += 1
            events += self._decode_chunk(log_probs)
        if self.is_finished and not self._is_decoded:
            self._is_decoded = True
            events += self._finish_utterance(self.utterance.num_frames, self._beam())
        return events

    def _advance(self) -> list[Event]:
        (chunks,) = forward_batch([self])
        return self.decode_chunks(chunks)

    def _decode_chunk(self, log_probs: LogProbs) -> list[Event]:
        """Decode a chunk, and begin another utterance after each endpoint in it."""
        best = log_probs.argmax(1)
        is_silent = np.isin(best, self.recognizer.silent_token_ids)
        starts_word = np.isin(best, self.recognizer.word_starts)
        limit = self._rules.max_utterance
        events: list[Event] = []
        decoded_frames = 0
        for frame in range(len(log_probs)):
            utterance = self.utterance
            num_frames = utterance.num_frames + frame - decoded_frames  # before this one
            position = utterance.first_frame + num_frames
            if position * self.recognizer.samples_per_frame >= self._num_samples:
                break  # no rule counts the zeros after the end
            gap_frames = utterance.silent_frames
            has_space = utterance.has_space or bool(starts_word[frame])
            utterance.silent_frames = gap_frames + 1 if is_silent[frame] else 0
            utterance.has_space = has_space and bool(is_silent[frame])
            utterance.is_spoken |= not is_silent[frame]
            seconds = self._frames_to_seconds(position + 1 - self._turn_start)
            rule = self._rules.matching_rule(
                is_spoken=utterance.is_spoken,
                silence=self._silence_seconds(self._frames_to_seconds(num_frames + 1)),
                seconds=seconds,
            )
            if (
                seconds >= limit - min(CUT_SECONDS, limit / 2)
                and gap_frames > 0
                and (has_space, gap_frames) > utterance.longest_gap
                and (rule == "longest" or not is_silent[frame])
            ):
                self._decode(log_probs[decoded_frames:frame])
                decoded_frames = frame
                utterance.longest_gap = has_space, gap_frames
                utterance.cut_frame = num_frames - gap_frames // 2
                utterance.cut_beam = self._beam()
            if rule is None:
                continue
            self._decode(log_probs[decoded_frames : frame + 1])
            decoded_frames = frame + 1
            events.append(Endpoint(seconds=self._decoded_seconds, rule=rule))
            if rule != "longest" or not utterance.cut_frame:
                utterance.cut_frame, utterance.cut_beam = utterance.num_frames, self._beam()
            behind = np.concatenate(utterance.log_probs)[utterance.cut_frame :]
            events += self._finish_utterance(utterance.cut_frame, utterance.cut_beam)
            if rule == "longest" or self._rules.ends_turns:
                self._turn_start = self.utterance.first_frame
            if len(behind):
                undecoded = np.concatenate([behind, log_probs[decoded_frames:]])
                return events + self._decode_chunk(undecoded)
        if decoded_frames < len(log_probs):
            self._decode(log_probs[decoded_frames:])
            events += self._emit_partial()
        return events

    def _silence_seconds(self, seconds: float) -> float:
        """Return the length of the silence at the end of the utterance's first ``seconds``.

        A detector reports the end of speech after its hang-over. That was silent, too, so the
        silence is measured from the end of the speech, not from the report.
        """
        if self._detector is None:
            return self._frames_to_seconds(self.utterance.silent_frames)
        now = self._frames_to_seconds(self.utterance.first_frame) + seconds
        num_reported = bisect(self._speech_events, now, key=lambda event: event.detected)
        if num_reported == 0:
            return seconds
        last = self._speech_events[num_reported - 1]
        return 0.0 if last.kind == "started" else min(seconds, now - last.seconds)

    def _decode(self, log_probs: LogProbs) -> None:
        utterance = self.utterance
        utterance.decoder_state = self._decoder.advance(utterance.decoder_state, log_probs)
        utterance.log_probs.append(log_probs)
        utterance.num_frames += len(log_probs)

    def _emit_partial(self) -> list[Event]:
        """Return the text so far, if it has changed.

        A word is stable if nearly all of the beam agrees on it. The last word may still grow.
        """
        beam = self._beam()
        words_of_beam = [self._words(hypothesis) for hypothesis in beam]
        words = words_of_beam[0]
        text = printable(" ".join(words))
        if text == self.utterance.last_partial:
            return []
        self.utterance.last_partial = text
        shares = agreement(words, words_of_beam, [hypothesis.score for hypothesis in beam])
        unstable = np.flatnonzero(shares[:-1] < STABLE_SHARE)
        num_stable = int(unstable[0]) if len(unstable) else max(0, len(words) - 1)
        return [Partial(seconds=self._decoded_seconds, text=text, stable=num_stable)]

    def _finish_utterance(self, num_frames: int, beam: Sequence[Hypothesis]) -> list[Event]:
        """Return the text of the utterance, if it has any, and begin the next one."""
        utterance = self.utterance
        next_frame = utterance.first_frame + num_frames
        first_sample = utterance.first_frame * self.recognizer.samples_per_frame
        end_sample = min(next_frame * self.recognizer.samples_per_frame, self._num_samples)
        events: list[Event] = []
        words = self._words(beam[0])
        if words:
            start = self._to_seconds(self._offset + first_sample)
            timed_words = self.recognizer.aligner.align(
                np.concatenate(utterance.log_probs)[:num_frames],
                list(beam[0].tokens),
                samples=end_sample - first_sample,
                is_decoded=True,
            )
            final = Final(
                seconds=self._decoded_seconds,
                text=printable(" ".join(words)),
                start=start,
                end=self._to_seconds(self._offset + end_sample),
                words=tuple(replace(w.later(start), text=printable(w.text)) for w in timed_words),
            )
            events.append(final)
        self.utterance = Utterance(next_frame, self._decoder.start())
        return events

    @property
    def _decoder(self) -> Decoder:
        return self.recognizer.decoder

    def _beam(self) -> Sequence[Hypothesis]:
        return self._decoder.finish(self.utterance.decoder_state)

    def _words(self, hypothesis: Hypothesis) -> list[str]:
        return self.recognizer.aligner.tokenizer.words(hypothesis.tokens)

    def _frames_to_seconds(self, frames: int) -> float:
        return self._to_seconds(frames * self.recognizer.samples_per_frame)

    def _to_seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self.recognizer.sample_rate)

    @property
    def _decoded_seconds(self) -> float:
        """The end of the audio in all chunks so far, in seconds of the stream."""
        chunks = self.recognizer.chunks
        end = (self._num_chunks - 1) * chunks.step + chunks.window
        return self._to_seconds(self._offset + min(end, self._num_samples))


def agreement(
    words: Sequence[str], beam: Sequence[Sequence[str]], scores: Sequence[float]
) -> Float64s:
    """Return the share of a beam's probability that agrees with each word: -> (W,).

    words: of the best hypothesis; beam: the words of every hypothesis, which are aligned with
    them; scores: natural logarithms.
    """
    shares = np.exp(np.array(scores) - max(scores))
    agrees = np.array([word_correctness(text, words) for text in beam], np.float64)
    agreed: Float64s = shares @ agrees / shares.sum()
    return agreed


def advance_batch(sessions: Sequence[Session]) -> list[list[Event] | Exception]:
    """Run the samples fed to sessions of one recognizer as one batch.

    Returns the events of each session, or the error of its decoder; the other sessions go on. An
    error of the model changes no session, so the call may be repeated.
    """
    results: list[list[Event] | Exception] = []
    for session, chunks in zip(sessions, forward_batch(sessions), strict=True):
        try:
            results.append(session.decode_chunks(chunks))
        except Exception as error:
            results.append(error)
    return results


def forward_batch(sessions: Sequence[Session]) -> list[list[LogProbs]]:
    """Run only the model, on the samples fed to sessions; return each session's chunks (U, V)."""
    if not sessions:
        return []
    recognizer = sessions[0].recognizer
    sizes = recognizer.chunks
    tail = tail_samples(recognizer.sample_rate)
    ends = [tail if session.is_finished and session.has_work else 0 for session in sessions]
    pending = [np.pad(session.pending, (0, n)) for session, n in zip(sessions, ends, strict=True)]
    states = [session.model_state for session in sessions]
    needed = [sizes.shortest if session.is_finished else sizes.window for session in sessions]
    outputs: list[list[LogProbs]] = [[] for _ in sessions]
    while ready := [n for n, samples in enumerate(pending) if len(samples) >= needed[n]]:
        results = recognizer.model.advance(
            [pending[n][: sizes.window] for n in ready], [states[n] for n in ready]
        )
        for n, (log_probs, state) in zip(ready, results, strict=True):
            outputs[n].append(log_probs)
            states[n] = state
            pending[n] = pending[n][sizes.step :]
    for session, state, samples in zip(sessions, states, pending, strict=True):
        session.model_state = state
        session.pending = samples
    return outputs
