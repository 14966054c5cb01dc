"""Levels of the windows of a clip: how far speech stands above noise, and where it pauses.

Legend: S samples, W windows of 20 ms.
"""

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples

WINDOWS_PER_SECOND = 50
SHORT_PAUSE_SECONDS = 0.2  # the closure of a stop consonant lasts up to 0.15
NOISE_AND_SPEECH_PERCENTILES = (5, 95)  # of the levels of a clip's windows

# A window is a pause if it is at most 3 steps of int16 or 35 dB below speech, or, where noise is 15
# dB below speech, within 6 dB of the noise.
PAUSE_BELOW_SPEECH_DB, PAUSE_ABOVE_NOISE_DB, MIN_SNR_DB, SILENCE_DB = 35.0, 6.0, 15.0, 10.0

Levels = npt.NDArray[np.float32]


def window_levels(samples: Samples, window: int) -> Levels:
    """Compute the level of each window, (S,) -> (W,), in dB above one step of int16."""
    count = len(samples) // window
    windows = samples[: count * window].reshape(count, window).astype(np.float32)
    levels: Levels = 10 * np.log10(np.square(windows).mean(1) + 1)
    return levels


def estimate_snr(samples: Samples, sample_rate: int) -> float | None:
    """Return how many dB speech is above noise in a clip (S,); None if shorter than a window.

    The estimate compares the loudest and the quietest twentieth of the windows, so it is too low
    for speech without pauses.
    """
    levels = window_levels(samples, sample_rate // WINDOWS_PER_SECOND)
    if not len(levels):
        return None
    noise, speech = np.percentile(levels, NOISE_AND_SPEECH_PERCENTILES).tolist()
    return float(speech - noise)


def find_pauses(samples: Samples, window: int) -> list[list[int]]:
    """Find the pauses of a clip: (S,) -> [first window, end window] of each.

    >>> find_pauses(np.repeat(np.int16([9000, 0, 9000]), 320), window=160)
    [[2, 4]]
    """
    if len(samples) < window:
        return []
    levels = window_levels(samples, window)
    noise, speech = np.percentile(levels, NOISE_AND_SPEECH_PERCENTILES).tolist()
    threshold = max(speech - PAUSE_BELOW_SPEECH_DB, SILENCE_DB)
    if speech - noise >= MIN_SNR_DB:
        threshold = max(threshold, noise + PAUSE_ABOVE_NOISE_DB)
    is_quiet = np.concatenate([[False], levels < threshold, [False]])
    pauses: list[list[int]] = np.flatnonzero(is_quiet[1:] != is_quiet[:-1]).reshape(-1, 2).tolist()
    return pauses
