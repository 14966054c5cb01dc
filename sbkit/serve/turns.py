"""The turns of a stream, as a detector of voice activity finds them."""

from dataclasses import dataclass, replace

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.runtime.voice_detector import VoiceDetector

BEFORE = 0.3  # seconds of a turn before its speech, as OpenAI's `prefix_padding_ms`
KEPT = 1.0  # seconds, in which a detector finds that speech has begun; what is older is dropped


@dataclass(frozen=True)
class Part:
    """Samples of a turn, and the place of the first one in the stream.

    began, ended: when the turn's speech did, in seconds, of its first part and of its last.
    """

    place: int
    samples: Samples
    began: float | None = None
    ended: float | None = None


class SpeechTurns:
    """Cut a stream into turns, from a little before speech to the silence that ends it."""

    def __init__(self, detector: VoiceDetector, *, silence: float, start: float) -> None:
        """Begin; silence: seconds that end a turn; start: the time of the stream's first sample."""
        rules = replace(detector.rules, hang_over=silence)
        self._detector, self._rate = replace(detector, rules=rules), detector.model.sample_rate
        self._state, self._start = detector.start(), start
        self._first = seconds_to_samples(start, self._rate)  # the place of what is held
        self._held, self._is_speech = np.zeros(0, np.int16), False

    def push(self, samples: Samples) -> list[Part]:
        """Take samples (S,) of int16, and return what of them is in turns."""
        events, self._state = self._detector.push(samples, self._state)
        self._held = np.concatenate([self._held, samples])
        parts, began = list[Part](), None
        for event in events:
            self._is_speech, seconds = event.kind == "started", self._start + event.seconds
            if self._is_speech:
                self._take(seconds - BEFORE)
                began = seconds
            else:
                parts.append(Part(*self._take(self._start + event.known), began, seconds))
                began = None
        now = samples_to_seconds(self._first + len(self._held), self._rate)
        if self._is_speech:
            parts.append(Part(*self._take(now), began))
        else:
            self._take(now - KEPT)
        return parts

    def _take(self, until: float) -> tuple[int, Samples]:
        """Take what is held up to a time, with its place."""
        place, held = self._first, self._held
        end = min(len(held), max(0, seconds_to_samples(until, self._rate) - place))
        self._first, self._held = place + end, held[end:]
        return place, held[:end]
