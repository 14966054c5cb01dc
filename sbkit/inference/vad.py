"""Voice activity: where speech is, of a whole clip, or as it comes in pieces of any size.

    samples -> a model's probability of speech, frame by frame -> events: started, stopped

Legend: S samples, U frames of the model.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds

Probabilities = npt.NDArray[np.floating[Any]]


class FrameModel(Protocol):
    """What gives each frame its probability of speech, and holds nothing of a stream.

    step: samples from one frame to the next; overlap: that a frame needs of the next one's.
    """

    sample_rate: int
    step: int
    overlap: int

    def start(self) -> Any:
        """Return the state of one stream before its first sample, which nothing changes."""

    def advance(self, samples: Samples, state: Any) -> tuple[Probabilities, Any]:
        """Compute U frames of U * step + overlap samples, and the state after them."""


class Segment(NamedTuple):
    """Speech, from start to end in seconds."""

    start: float
    end: float


class SpeechEvent(NamedTuple):
    """Speech has started or stopped at ``seconds``; the audio up to ``known`` told so."""

    kind: Literal["started", "stopped"]
    seconds: float
    known: float


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """From probabilities to segments.

    onset: the probability at which speech may begin; offset: below it, speech may end. Seconds:
    shortest: of speech without a frame below ``offset``, to count; hang_over: without a frame of
    speech, after which it has ended; padding: added on both sides, at most ``hang_over``.
    """

    onset: float = 0.5
    offset: float = 0.35
    shortest: float = 0.1
    hang_over: float = 0.3
    padding: float = 0.05


@dataclass(frozen=True)
class SpeechState:
    """Where a stream stands; it never changes, so that a copy is the state itself.

    model: what the model keeps; samples (S,): from the first one of the next frame; frames: so
    far; first: of the speech that may have begun; last: the frame after the last one of speech;
    is_speech: whether that was long enough; end: of the segment before, in seconds.
    """

    model: Any
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16))
    frames: int = 0
    first: int | None = None
    last: int = 0
    is_speech: bool = False
    end: float = 0.0


@dataclass(frozen=True)
class VoiceDetector:
    """Find speech by a model of frames; any number of streams, and of threads, may share it."""

    model: FrameModel
    rules: SpeechRules = field(default_factory=SpeechRules)

    def start(self) -> SpeechState:
        """Return the state of a stream before its first sample."""
        return SpeechState(self.model.start())

    def push(self, samples: Samples, state: SpeechState) -> tuple[list[SpeechEvent], SpeechState]:
        """Take samples (S,) of int16, and return what they make known, and the state after them."""
        step, waiting = self.model.step, np.concatenate([state.samples, samples])
        frames = (len(waiting) - self.model.overlap) // step
        if frames <= 0:
            return [], replace(state, samples=waiting)
        taken = waiting[: frames * step + self.model.overlap]
        probabilities, kept = self.model.advance(taken, state.model)
        state = replace(state, model=kept, samples=waiting[frames * step :])
        events = list[SpeechEvent]()
        for probability in probabilities.tolist():
            event, state = self._read(probability, state)
            events += [] if event is None else [event]
        return events, state

    def finish(self, state: SpeechState) -> list[SpeechEvent]:
        """End a stream: speech that goes on stops with its last sample."""
        samples = state.frames * self.model.step + len(state.samples)
        end = samples_to_seconds(samples, self.model.sample_rate)
        return [SpeechEvent("stopped", end, end)] if state.is_speech else []

    def speech_segments(self, audio: Samples) -> list[Segment]:
        """Return where speech is in a whole clip (S,) of int16."""
        events, state = self.push(audio, self.start())
        times = [each.seconds for each in (*events, *self.finish(state))]
        return list(map(Segment, times[::2], times[1::2]))

    def _read(
        self, probability: float, state: SpeechState
    ) -> tuple[SpeechEvent | None, SpeechState]:
        """Take one frame."""
        rules, frames, first = self.rules, state.frames + 1, state.first
        last, now = state.last, self._seconds(frames)
        if probability >= (rules.onset if first is None else rules.offset):
            first, last = (frames - 1 if first is None else first), frames
        elif not state.is_speech:
            first = None
        after = replace(state, frames=frames, first=first, last=last)
        if first is None:
            return None, after
        if not state.is_speech and self._seconds(last - first) >= rules.shortest:
            begin = max(state.end, self._seconds(first) - rules.padding)
            return SpeechEvent("started", begin, now), replace(after, is_speech=True)
        if state.is_speech and self._seconds(frames - last) >= rules.hang_over:
            end = self._seconds(last) + rules.padding
            after = replace(after, first=None, is_speech=False, end=end)
            return SpeechEvent("stopped", end, now), after
        return None, after

    def _seconds(self, frames: int) -> float:
        return samples_to_seconds(frames * self.model.step, self.model.sample_rate)
