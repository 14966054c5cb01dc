"""Turns of a live stream: each from a little before its speech to the silence that ends it."""

from dataclasses import dataclass, replace

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.tasks.vad.predict import VoiceDetector

SPEECH_PADDING_SECONDS = 0.3  # of audio before the speech of a turn: OpenAI's `prefix_padding_ms`
# A detector finds the start of speech within this time; earlier audio is dropped.
DETECTION_SECONDS = 1.0
NO_SAMPLES = np.zeros(0, np.int16)


@dataclass(frozen=True)
class TurnBlock:
    """Successive samples of a turn; times are in seconds of the session."""

    start: int  # the index of the first sample in the session
    samples: Samples
    speech_start: float | None = None  # only in the first block of a turn
    speech_end: float | None = None  # only in the last block of a turn


class SpeechTurns:
    """Cut a stream into turns, from a little before the speech to the silence that ends it.

    silence: seconds that end a turn.
    start: the time of the stream's first sample in the session.
    """

    def __init__(self, detector: VoiceDetector, *, silence: float, start: float) -> None:
        rules = replace(detector.rules, hang_over=silence)
        self._detector = replace(detector, rules=rules)
        self._rate = detector.model.sample_rate
        self._state = detector.start()
        self._start = start
        self._pending = NO_SAMPLES
        self._is_speech = False
        self._pending_start = seconds_to_samples(start, self._rate)  # an index in the session

    def push(self, samples: Samples) -> list[TurnBlock]:
        """Take samples (S,) of int16; return the blocks of turns that they complete."""
        events, self._state = self._detector.push(samples, self._state)
        self._pending = np.concatenate([self._pending, samples])
        blocks: list[TurnBlock] = []
        speech_start: float | None = None
        for event in events:
            self._is_speech = event.kind == "started"
            seconds = self._start + event.seconds
            if self._is_speech:
                self._take(seconds - SPEECH_PADDING_SECONDS)
                speech_start = seconds
            else:
                block = self._take(self._start + event.detected)
                blocks.append(TurnBlock(*block, speech_start, speech_end=seconds))
                speech_start = None
        now = samples_to_seconds(self._pending_start + len(self._pending), self._rate)
        if self._is_speech:
            blocks.append(TurnBlock(*self._take(now), speech_start))
        else:
            self._take(now - DETECTION_SECONDS)
        return blocks

    def _take(self, until: float) -> tuple[int, Samples]:
        """Take pending samples up to a time; return the index of the first, and the samples."""
        start, pending = self._pending_start, self._pending
        count = min(len(pending), max(0, seconds_to_samples(until, self._rate) - start))
        self._pending_start = start + count
        self._pending = pending[count:]
        return start, pending[:count]
