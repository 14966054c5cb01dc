"""A live session: samples in, events out, with text that grows, endpoints, and words in time.

Legend: S samples, U frames, V vocabulary.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from sbkit.audio.io import Samples, to_samples
from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.confidence import agreement
from sbkit.decoding.frames import Hypothesis, LogProbs
from sbkit.live.endpoint import EndpointRules
from sbkit.live.recognizer import LiveRecognizer
from sbkit.runtime.voice_detector import SpeechEvent, VoiceDetector
from sbkit.text.word import Word

AGREED = 0.95  # share of the beam, by its scores, that has a word which counts as stable


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a session has to say; ``seconds`` of audio had come when it was known."""

    seconds: float

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON; its event is the name of the class."""
        rounded = {name: round(x, 3) for name, x in asdict(self).items() if isinstance(x, float)}
        return {"event": type(self).__name__.lower(), **asdict(self), **rounded}


@dataclass(frozen=True, kw_only=True)
class Partial(Event):
    """The text of an utterance so far; its first ``stable`` words will hardly change."""

    text: str
    stable: int


@dataclass(frozen=True, kw_only=True)
class Endpoint(Event):
    """An utterance has ended, by a rule: nothing, silence or longest."""

    rule: str


@dataclass(frozen=True, kw_only=True)
class Final(Event):
    """The text of an utterance, from start to end in the stream, and its words in time."""

    text: str
    start: float
    end: float
    words: tuple[Word, ...]

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**super().plain(), "words": [word.plain() for word in self.words]}


@dataclass
class Utterance:
    """What is kept of an utterance until it ends.

    first: its first frame in the stream; search: the state of the search; log_probs: (U, V) of its
    parts; silence: frames since the last one with a token; shown: the text of the last Partial.
    """

    first: int
    search: Any
    log_probs: list[LogProbs] = field(default_factory=list)
    frames: int = 0
    silence: int = 0
    is_spoken: bool = False
    shown: str = ""


class Session:
    """One stream of speech; `push` samples as they come, and `finish` it.

    Several sessions of one recognizer are run as one batch by `feed` and `advance_batch`. What the
    events are does not depend on how the audio is cut into pieces.
    """

    def __init__(
        self,
        recognizer: LiveRecognizer,
        rules: EndpointRules | None = None,
        *,
        start: int = 0,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Begin; rules: when an utterance ends, by default those of the recognizer.

        start: the place of its first sample in the stream that the times of events are of;
        detector: tells what silence is, by default frames without a token.
        """
        self.recognizer, self.state = recognizer, recognizer.start()
        self._rules, self._start = recognizer.rules if rules is None else rules, start
        self._detector, self._turns = detector, list[SpeechEvent]()
        if detector is not None:
            detector.require_rate(recognizer.sample_rate)
            self._voice = detector.start()
        self.is_finished = False
        self.fed = np.zeros(0, np.int16)  # samples that no chunk was looked for in
        self._received = 0  # samples
        self._chunks = 0  # that were computed
        self._utterance = self._begin(0)

    def copy(self) -> "Session":
        """Return a session that goes on from here by itself."""
        made, utterance = copy(self), self._utterance
        made._turns = [*self._turns]
        made._utterance = replace(
            utterance,
            search=self.recognizer.decoder.search.copy(utterance.search),
            log_probs=[*utterance.log_probs],
        )
        return made

    def push(self, samples: Samples) -> list[Event]:
        """Take samples at the recognizer's rate, and return what they make known; see `feed`."""
        self.feed(samples)
        return advance_batch([self])[0]

    def finish(self) -> list[Event]:
        """End the stream, and return the rest."""
        self.is_finished = True
        return advance_batch([self])[0]

    def feed(self, samples: Samples) -> None:
        """Take samples for the next `advance_batch`, as `to_samples` takes them.

        Raises:
            SbkitError: the session is finished, or they are no audio.
        """
        if self.is_finished:
            raise SbkitError("This session is finished and takes no more samples; begin another.")
        samples = to_samples(samples)
        self.fed, self._received = np.append(self.fed, samples), self._received + len(samples)
        if self._detector is not None:
            events, self._voice = self._detector.push(samples, self._voice)
            self._turns += events

    @property
    def is_due(self) -> bool:
        """Check whether `advance_batch` has anything to do for it."""
        held = len(self.state.samples) + len(self.fed)
        return self.is_finished or held >= self.recognizer.chunks.window

    def read(self, chunks: Sequence[LogProbs]) -> Iterator[Event]:
        """Decode further chunks (U, V), and what is left of an utterance where it is finished."""
        for log_probs in chunks:
            self._chunks += 1
            yield from self._read_chunk(log_probs)
        if self.is_finished:
            yield from self._end(self._received)

    def _read_chunk(self, log_probs: LogProbs) -> Iterator[Event]:
        """Decode a chunk up to each endpoint in it."""
        blank = np.isin(log_probs.argmax(1), self.recognizer.silent)
        done = 0
        for frame, is_blank in enumerate(blank, 1):
            utterance = self._utterance
            utterance.silence = utterance.silence + 1 if is_blank else 0
            utterance.is_spoken |= not is_blank
            seconds = self._seconds(utterance.frames + frame - done)
            rule = self._rules.met(
                is_spoken=utterance.is_spoken, silence=self._silence(seconds), seconds=seconds
            )
            if rule is not None:
                self._decode(log_probs[done:frame])
                end, done = self._utterance.first + self._utterance.frames, frame
                yield Endpoint(seconds=self._now, rule=rule)
                yield from self._end(end * self.recognizer.samples_per_frame)
        if done < len(log_probs):
            self._decode(log_probs[done:])
            yield from self._show()

    def _silence(self, seconds: float) -> float:
        """Return how long it has been silent when the utterance has so many seconds.

        A detector knows the end of speech only after its hang-over, which was silence, too.
        """
        if self._detector is None:
            return self._seconds(self._utterance.silence)
        now = self._seconds(self._utterance.first) + seconds
        known = bisect(self._turns, now, key=lambda event: event.known)
        if known == 0:
            return seconds
        last = self._turns[known - 1]
        return 0.0 if last.kind == "started" else min(seconds, now - last.seconds)

    def _begin(self, frame: int) -> Utterance:
        return Utterance(frame, self.recognizer.decoder.search.start())

    def _decode(self, log_probs: LogProbs) -> None:
        utterance, search = self._utterance, self.recognizer.decoder.search
        utterance.search = search.advance(utterance.search, log_probs)
        utterance.log_probs.append(log_probs)
        utterance.frames += len(log_probs)

    def _show(self) -> Iterator[Event]:
        """Yield the text so far where it is another one.

        A word is stable where nearly all of the beam has it, and it is not the last, which may
        still grow.
        """
        beam = self._beam()
        words, *others = [self._words(each) for each in beam]
        text = printable(" ".join(words))
        if text != self._utterance.shown:
            self._utterance.shown = text
            shares = agreement(words, [words, *others], [each.score for each in beam])
            doubted = np.flatnonzero(shares[:-1] < AGREED)
            stable = int(doubted[0]) if len(doubted) else max(0, len(words) - 1)
            yield Partial(seconds=self._now, text=text, stable=stable)

    def _end(self, end: int) -> Iterator[Event]:
        """Yield the text of the utterance if it has any, and begin the next; end: in samples."""
        utterance, live = self._utterance, self.recognizer
        first = utterance.first * live.samples_per_frame
        best, *_ = beam = self._beam()
        if words := self._words(best):
            log_probs = np.concatenate(utterance.log_probs)
            tokens, start = list(best.tokens), self._samples(self._start + first)
            timed = live.decoder.aligner.align(log_probs, tokens, beam, samples=end - first)
            yield Final(
                seconds=self._now,
                text=printable(" ".join(words)),
                start=start,
                end=self._samples(self._start + end),
                words=tuple(
                    replace(word.later(start), text=printable(word.text)) for word in timed
                ),
            )
        self._utterance = self._begin(utterance.first + utterance.frames)

    def _beam(self) -> Sequence[Hypothesis]:
        return self.recognizer.decoder.search.finish(self._utterance.search)

    def _words(self, hypothesis: Hypothesis) -> list[str]:
        return self.recognizer.decoder.aligner.tokenizer.words(hypothesis.tokens)

    def _seconds(self, frames: int) -> float:
        return self._samples(frames * self.recognizer.samples_per_frame)

    def _samples(self, samples: int) -> float:
        return samples_to_seconds(samples, self.recognizer.sample_rate)

    @property
    def _now(self) -> float:
        """The end of the audio that the chunks so far are computed of, in seconds."""
        chunks = self.recognizer.chunks
        end = (self._chunks - 1) * chunks.step + chunks.window
        return self._samples(self._start + min(end, self._received))


def advance_batch(sessions: Sequence[Session]) -> list[list[Event]]:
    """Run what was fed to sessions of one recognizer as one batch; return the events of each."""
    chunks = forward_batch(sessions)
    return [list(session.read(each)) for session, each in zip(sessions, chunks, strict=True)]


def forward_batch(sessions: Sequence[Session]) -> list[list[LogProbs]]:
    """Run the model alone; return the chunks of each. After an error it may be called again."""
    if not sessions:
        return []
    pieces, states = [each.fed for each in sessions], [each.state for each in sessions]
    ends = [each.is_finished for each in sessions]
    found = sessions[0].recognizer.forward_chunk(pieces, states, ends)
    for session, (_, state) in zip(sessions, found, strict=True):
        session.state, session.fed = state, session.fed[:0]
    return [chunks for chunks, _ in found]
