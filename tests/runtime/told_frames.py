"""A model of voice activity that is told: a frame's first sample is its probability of speech."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sbkit.audio.io import Samples

ONE = 32767  # of int16: certainly speech


class ToldFrames:
    """Frames of 20 ms, each with 15 ms of the next one; the state counts them."""

    sample_rate, step, overlap, delay = 16_000, 320, 240, 0

    def start(self) -> int:
        return 0

    def advance(self, samples: Samples, state: int) -> tuple[Any, int]:
        frames = samples[: -self.overlap].reshape(-1, self.step)[:, 0]
        return frames / ONE, state + len(frames)


def tell(*runs: tuple[float, float]) -> Samples:
    """Return audio of runs, each of seconds with a probability."""
    return np.concatenate([np.full(round(s * 16_000), round(p * ONE), np.int16) for s, p in runs])


def is_speech(*runs: float) -> Sequence[tuple[float, float]]:
    """Return runs that are silence and speech in turns, for `tell`."""
    return [(seconds, float(place % 2)) for place, seconds in enumerate(runs)]
