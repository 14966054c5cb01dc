"""Levels of a clip's windows, and how far speech stands above noise.

Legend: S samples, W windows of 20 ms.
"""

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples

WINDOWS = 50  # a second
SPEECH, NOISE = 95, 5  # percentiles of the levels of windows

Levels = npt.NDArray[np.float32]


def window_levels(samples: Samples, window: int) -> Levels:
    """Compute the level of each window, (S,) -> (W,), in dB above one step of int16."""
    count = len(samples) // window
    windows = samples[: count * window].reshape(count, window).astype(np.float32)
    levels: Levels = 10 * np.log10(np.square(windows).mean(1) + 1)
    return levels


def level_range(levels: Levels) -> tuple[float, float]:
    """Return the levels of noise and of speech, in dB.

    A twentieth of the windows stays below the one, and a twentieth rises above the other.
    """
    noise, speech = np.percentile(levels, (NOISE, SPEECH)).tolist()
    return noise, speech


def estimate_snr(samples: Samples, sample_rate: int) -> float | None:
    """Return how many dB speech is above noise in a clip (S,); None for less than a window.

    It is what the loudest twentieth of windows has above the quietest: too low where nobody pauses.
    """
    levels = window_levels(samples, sample_rate // WINDOWS)
    if not len(levels):
        return None
    noise, speech = level_range(levels)
    return speech - noise


# A window is quiet 35 dB below speech, within 6 dB of the noise where that is 15 dB below, or at
# 3 steps of int16.
BELOW_SPEECH, ABOVE_NOISE, LEAST_RANGE, SILENCE = 35.0, 6.0, 15.0, 10.0  # dB


def find_pauses(samples: Samples, window: int) -> list[list[int]]:
    """Find what is quiet beside the rest: (S,) -> the first window of each, and the one after."""
    count = len(samples) // window
    if count == 0:
        return []
    levels = window_levels(samples, window)
    noise, speech = level_range(levels)
    threshold = max(speech - BELOW_SPEECH, SILENCE)
    if speech - noise >= LEAST_RANGE:
        threshold = max(threshold, noise + ABOVE_NOISE)
    quiet = np.concatenate([[False], levels < threshold, [False]])
    pauses: list[list[int]] = np.flatnonzero(quiet[1:] != quiet[:-1]).reshape(-1, 2).tolist()
    return pauses
