"""Levels of the windows of a clip: how far speech stands above noise, and where it pauses.

Legend: S samples, W windows of 20 ms.
"""

import numpy as np

from sbkit.audio.io import Samples

WINDOWS_PER_SECOND = 50
SHORT_PAUSE_SECONDS = 0.2  # the closure of a stop consonant lasts up to 0.15
NOISE_AND_SPEECH_PERCENTILES = (5, 95)  # of the levels of a clip's windows

# A window is a pause if it is at most 3 steps of int16 or 35 dB below speech, or, where noise is 15
# dB below speech, within 6 dB of the noise.
PAUSE_BELOW_SPEECH_DB, PAUSE_ABOVE_NOISE_DB, MIN_SNR_DB, SILENCE_DB = 35.0, 6.0, 15.0, 10.0


def find_pauses(samples: Samples, window: int) -> list[list[int]]:
    """Find the pauses of a clip: (S,) -> [first window, end window] of each.

    >>> find_pauses(np.repeat(np.int16([9000, 0, 9000]), 320), window=160)
    [[2, 4]]
    """
    if len(samples) < window:
        return []
    windows = samples[: len(samples) // window * window].reshape(-1, window).astype(np.float32)
    levels = 10 * np.log10(np.square(windows).mean(1) + 1)  # dB above one step of int16, (W,)
    noise, speech = np.percentile(levels, NOISE_AND_SPEECH_PERCENTILES).tolist()
    threshold = max(speech - PAUSE_BELOW_SPEECH_DB, SILENCE_DB)
    if speech - noise >= MIN_SNR_DB:
        threshold = max(threshold, noise + PAUSE_ABOVE_NOISE_DB)
    is_quiet = np.concatenate([[False], levels < threshold, [False]])
    pauses: list[list[int]] = np.flatnonzero(is_quiet[1:] != is_quiet[:-1]).reshape(-1, 2).tolist()
    return pauses
