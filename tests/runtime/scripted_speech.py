"""Speech models whose output is known: from the first sample of each frame, or its loudness."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sbkit.audio.io import Samples

CERTAIN_SPEECH = 32767  # of int16


class ScriptedSpeech:
    """Frames of 20 ms, each with 15 ms of the next one; the state counts them."""

    sample_rate, shift, overlap, delay = 16_000, 320, 240, 0

    def start(self) -> int:
        return 0

    def advance(self, samples: Samples, state: int) -> tuple[Any, int]:
        frames = samples[: -self.overlap].reshape(-1, self.shift)[:, 0]
        return frames / CERTAIN_SPEECH, state + len(frames)


class LoudSpeech:
    """Take frames of 10 ms with loud audio for speech."""

    sample_rate, shift, overlap, delay = 16_000, 160, 0, 0

    def start(self) -> None:
        return None

    def advance(self, samples: Samples, state: None) -> tuple[Any, None]:
        frames = np.abs(samples.reshape(-1, self.shift).astype(np.float32))
        return (frames.mean(1) > 150).astype(np.float32), None


def script(*runs: tuple[float, float]) -> Samples:
    """Return audio of runs: (seconds, probability of speech)."""
    return np.concatenate(
        [np.full(round(s * 16_000), round(p * CERTAIN_SPEECH), np.int16) for s, p in runs]
    )


def is_speech(*runs: float) -> Sequence[tuple[float, float]]:
    """Return runs for `script`: silence and speech in turn, of these durations."""
    return [(seconds, float(index % 2)) for index, seconds in enumerate(runs)]
