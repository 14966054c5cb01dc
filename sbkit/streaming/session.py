"""Sessions of streaming speech: samples in, events out, with growing text and timed words.

Audio arrives in blocks of any size, and runs through the model in chunks. The model has a thread of
its own and may use any runtime; this file imports none.

Legend: S samples, U frames, V vocabulary.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from sbkit.audio.io import Samples, to_samples
from sbkit.base.arrays import LogProbs
from sbkit.base.errors import BundleError, SbkitError
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.decoder import BeamDecoder, ClipDecoder
from sbkit.decoding.greedy import Hypothesis
from sbkit.decoding.words import agreement
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.transcriber import open_recognizer
from sbkit.runtime.voice_detector import SpeechEvent, VoiceDetector
from sbkit.text.word import Word

STABLE_SHARE = 0.95  # of the beam, weighted by scores, that must agree on a stable word


@dataclass(frozen=True, kw_only=True)
class EndpointRules:
    """When an utterance ends, in seconds.

    A frame is silent if its best token is blank or a space. The rules are Kaldi's
    (`online2/online-endpoint.h`), the numbers sherpa-onnx's.

    >>> EndpointRules().met(is_spoken=True, silence=1.3, seconds=4.0)
    'silence'
    """

    nothing: float = 2.4  # of silence, if nothing was decoded
    silence: float = 1.2  # of silence, after something was decoded
    longest: float = 20.0  # of utterance, whatever it contains

    def met(self, *, is_spoken: bool, silence: float, seconds: float) -> str | None:
        """Return the name of the rule that ends the utterance now, or None."""
        if silence >= (self.silence if is_spoken else self.nothing):
            return "silence" if is_spoken else "nothing"
        return "longest" if seconds >= self.longest else None


class StreamingRecognizer(AbstractContextManager["StreamingRecognizer"]):
    """The model and the decoder of many sessions; made by `StreamingRecognizer.load`.

    decoder: decodes, and times the words.
    start: the model's state before the first sample of a session.
    """

    def __init__(self, *, bundle: OpenBundle, rules: EndpointRules | None = None) -> None:
        """Take a bundle whose model has a thread of its own.

        Raises:
            BundleError: the model or its decoder only takes whole clips.
        """
        self.model, self.effective = bundle.model, bundle.model.effective
        self.rules = EndpointRules() if rules is None else rules
        self.sample_rate = bundle.config.sample_rate
        if (chunks := self.model.chunks) is None:
            raise BundleError(
                "`--live` needs a streaming model, from a YAML with `streaming`. This one, run by "
                f"{self.effective.runtime}, only takes whole clips. Train "
                "hparams/ctc_streaming.yaml, or leave out --live."
            )
        self.chunks = chunks
        self.samples_per_frame = self.model.samples_per_frame
        self.decoder: ClipDecoder = bundle.decoder_pool.decoder
        self.silent = bundle.tokenizer.silent
        decoder = self.decoder.decoder
        if isinstance(decoder, BeamDecoder) and decoder.attention_rescoring:
            raise BundleError(
                "The decoder of this model rescores with the attention decoder, which takes whole "
                "clips. Pass --decoder greedy to transcribe live speech, or tune another decoder: "
                "sbkit tune RUN --no-attention-rescoring"
            )
        decoder.start()  # raises an error for a decoding graph, which takes whole clips, too
        self.start = self.model.start()

    @classmethod
    def load(
        cls, folder: Path | str, *, rules: EndpointRules | None = None, **options: Any
    ) -> Self:
        """Load a bundle, with the options of `Transcriber.load` except ``times``.

        Raises:
            SbkitError: the bundle cannot be used here, or only takes whole clips.
        """
        bundle = open_recognizer(Path(folder), streaming="only", **options)
        try:
            return cls(bundle=bundle, rules=rules)
        except BaseException:
            bundle.model.close()
            raise

    def close(self) -> None:
        self.model.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a session."""

    seconds: float  # of audio received when it was emitted

    def plain(self) -> dict[str, object]:
        """Return plain data, for JSON; ``event`` is the name of the class."""
        rounded = {name: round(x, 3) for name, x in asdict(self).items() if isinstance(x, float)}
        return {"event": type(self).__name__.lower(), **asdict(self), **rounded}


@dataclass(frozen=True, kw_only=True)
class Partial(Event):
    """The text of an utterance so far."""

    text: str
    stable: int  # the number of leading words that will hardly change


@dataclass(frozen=True, kw_only=True)
class Endpoint(Event):
    """An utterance has ended."""

    rule: str  # its name in `EndpointRules`


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

    first: int  # the index of its first frame in the stream
    decoder_state: Any
    log_probs: list[LogProbs] = field(default_factory=list)  # (U, V) of its chunks so far
    frames: int = 0  # so far
    silence: int = 0  # frames since the last one with a token
    is_spoken: bool = False  # whether any frame had a token
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
        rules: EndpointRules | None = None,
        *,
        start: int = 0,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Begin a session.

        rules: when an utterance ends, by default the recognizer's.
        start: the index of the session's first sample in the stream; events have times of the
            stream.
        detector: detects silence; by default, frames without a token are silent.
        """
        self.recognizer, self.model_state = recognizer, recognizer.start
        self._rules, self._start = recognizer.rules if rules is None else rules, start
        self._detector = detector
        self._speech_events: tuple[SpeechEvent, ...] = ()
        if detector is not None:
            detector.require_rate(recognizer.sample_rate)
            self._detector_state = detector.start()
        self.is_finished = False
        self.pending = np.zeros(0, np.int16)  # from the first sample of the next chunk
        self._received = self._num_chunks = 0  # samples; chunks
        self.utterance = self._begin(0)

    def copy(self) -> "Session":
        """Return an independent session that continues from here."""
        session, utterance = copy(self), self.utterance
        state = self.recognizer.decoder.decoder.copy(utterance.decoder_state)
        log_probs = [*utterance.log_probs]
        session.utterance = replace(utterance, decoder_state=state, log_probs=log_probs)
        return session

    def push(self, samples: Samples) -> list[Event]:
        """Take samples at the recognizer's rate, and return the new events; see `feed`."""
        self.feed(samples)
        return advance_batch([self])[0]

    def finish(self) -> list[Event]:
        """End the stream, and return its last events."""
        self.is_finished = True
        return advance_batch([self])[0]

    def feed(self, samples: Samples) -> None:
        """Take samples, which `to_samples` converts, for the next `advance_batch`.

        Raises:
            SbkitError: the session is finished, or the samples are not audio.
        """
        if self.is_finished:
            raise SbkitError("This session is finished and takes no more samples; begin another.")
        samples = to_samples(samples)
        self.pending = np.append(self.pending, samples)
        self._received += len(samples)
        if self._detector is not None:
            events, self._detector_state = self._detector.push(samples, self._detector_state)
            self._speech_events += tuple(events)

    @property
    def is_due(self) -> bool:
        """Whether `advance_batch` has anything to do for this session."""
        return self.is_finished or len(self.pending) >= self.recognizer.chunks.window

    def read(self, chunks: Sequence[LogProbs]) -> Iterator[Event]:
        """Decode more chunks (U, V), and end the utterance if the session is finished."""
        for log_probs in chunks:
            self._num_chunks += 1
            yield from self._read_chunk(log_probs)
        if self.is_finished:
            yield from self._end(self._received)

    def _read_chunk(self, log_probs: LogProbs) -> Iterator[Event]:
        """Decode a chunk up to each endpoint in it."""
        silent_frames = np.isin(log_probs.argmax(1), self.recognizer.silent)
        done = 0
        for frame, is_silent in enumerate(silent_frames, 1):
            utterance = self.utterance
            utterance.silence = utterance.silence + 1 if is_silent else 0
            utterance.is_spoken |= not is_silent
            seconds = self._frame_seconds(utterance.frames + frame - done)
            rule = self._rules.met(
                is_spoken=utterance.is_spoken, silence=self._silence(seconds), seconds=seconds
            )
            if rule is not None:
                self._decode(log_probs[done:frame])
                end, done = utterance.first + utterance.frames, frame
                yield Endpoint(seconds=self._now, rule=rule)
                yield from self._end(end * self.recognizer.samples_per_frame)
        if done < len(log_probs):
            self._decode(log_probs[done:])
            yield from self._partial()

    def _silence(self, seconds: float) -> float:
        """Return the seconds of silence up to a time of the utterance.

        A detector reports the end of speech only after its hang-over, which also was silent.
        """
        if self._detector is None:
            return self._frame_seconds(self.utterance.silence)
        now = self._frame_seconds(self.utterance.first) + seconds
        num_detected = bisect(self._speech_events, now, key=lambda event: event.detected)
        if num_detected == 0:
            return seconds
        last = self._speech_events[num_detected - 1]
        return 0.0 if last.kind == "started" else min(seconds, now - last.seconds)

    def _begin(self, frame: int) -> Utterance:
        return Utterance(frame, self.recognizer.decoder.decoder.start())

    def _decode(self, log_probs: LogProbs) -> None:
        utterance, decoder = self.utterance, self.recognizer.decoder.decoder
        utterance.decoder_state = decoder.advance(utterance.decoder_state, log_probs)
        utterance.log_probs.append(log_probs)
        utterance.frames += len(log_probs)

    def _partial(self) -> Iterator[Event]:
        """Yield the text so far if it has changed.

        A word is stable if nearly all of the beam agrees on it. The last word may still grow.
        """
        beam = self._beam()
        candidates = [self._words(hypothesis) for hypothesis in beam]
        words = candidates[0]
        text = printable(" ".join(words))
        if text != self.utterance.last_partial:
            self.utterance.last_partial = text
            shares = agreement(words, candidates, [hypothesis.score for hypothesis in beam])
            unstable = np.flatnonzero(shares[:-1] < STABLE_SHARE)
            stable = int(unstable[0]) if len(unstable) else max(0, len(words) - 1)
            yield Partial(seconds=self._now, text=text, stable=stable)

    def _end(self, end: int) -> Iterator[Event]:
        """Yield the text of the utterance, if any, and begin the next one; end: in samples."""
        utterance, recognizer = self.utterance, self.recognizer
        first = utterance.first * recognizer.samples_per_frame
        best, *_ = beam = self._beam()
        if words := self._words(best):
            log_probs = np.concatenate(utterance.log_probs)
            tokens, start = list(best.tokens), self._seconds(self._start + first)
            timed = recognizer.decoder.aligner.align(log_probs, tokens, beam, samples=end - first)
            yield Final(
                seconds=self._now,
                text=printable(" ".join(words)),
                start=start,
                end=self._seconds(self._start + end),
                words=tuple(replace(w.later(start), text=printable(w.text)) for w in timed),
            )
        self.utterance = self._begin(utterance.first + utterance.frames)

    def _beam(self) -> Sequence[Hypothesis]:
        return self.recognizer.decoder.decoder.finish(self.utterance.decoder_state)

    def _words(self, hypothesis: Hypothesis) -> list[str]:
        return self.recognizer.decoder.aligner.tokenizer.words(hypothesis.tokens)

    def _frame_seconds(self, frames: int) -> float:
        return self._seconds(frames * self.recognizer.samples_per_frame)

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self.recognizer.sample_rate)

    @property
    def _now(self) -> float:
        """The end of the audio in all chunks so far, in seconds."""
        chunks = self.recognizer.chunks
        end = (self._num_chunks - 1) * chunks.step + chunks.window
        return self._seconds(self._start + min(end, self._received))


def advance_batch(sessions: Sequence[Session]) -> list[list[Event]]:
    """Run the samples fed to sessions of one recognizer as one batch; return their events."""
    outputs = forward_batch(sessions)
    return [list(session.read(chunks)) for session, chunks in zip(sessions, outputs, strict=True)]


def forward_batch(sessions: Sequence[Session]) -> list[list[LogProbs]]:
    """Run only the model, on the samples fed to sessions; return each session's chunks (U, V).

    The chunks of all sessions run as one batch. An error changes no session, so the call may be
    repeated.
    """
    if not sessions:
        return []
    recognizer, sizes = sessions[0].recognizer, sessions[0].recognizer.chunks
    pending = [session.pending for session in sessions]
    states = [session.model_state for session in sessions]
    needed = [sizes.shortest if session.is_finished else sizes.window for session in sessions]
    outputs: list[list[LogProbs]] = [[] for _ in sessions]
    while ready := [n for n, samples in enumerate(pending) if len(samples) >= needed[n]]:
        results = recognizer.model.advance(
            [pending[n][: sizes.window] for n in ready], [states[n] for n in ready]
        )
        for n, (log_probs, state) in zip(ready, results, strict=True):
            outputs[n].append(log_probs)
            states[n], pending[n] = state, pending[n][sizes.step :]
    for session, state, samples in zip(sessions, states, pending, strict=True):
        session.model_state, session.pending = state, samples
    return outputs
