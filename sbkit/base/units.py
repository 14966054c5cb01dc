"""Seconds, samples and frames: the only file that turns one into another.

Rates are those of Kaldi's filterbanks, which deployed runtimes compute:
16 kHz audio, a window of 25 ms every 10 ms, and only windows that lie wholly inside the audio.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Samples = TypeVar("Samples", "int", "npt.NDArray[np.int64]")  # one count, or an array of them

SAMPLE_RATE = 16_000  # samples per second
WINDOW_SAMPLES = 400  # 25 ms
SHIFT_SAMPLES = 160  # 10 ms


def seconds_to_samples(seconds: float, sample_rate: int = SAMPLE_RATE) -> int:
    """Round a duration to the nearest sample."""
    return round(seconds * sample_rate)


def samples_to_seconds(samples: int, sample_rate: int = SAMPLE_RATE) -> float:
    """Return the exact duration of a number of samples."""
    return samples / sample_rate


def samples_to_frames(samples: int) -> int:
    """Count the whole analysis windows in a number of samples (Kaldi's ``snip_edges``)."""
    return max(0, 1 + (samples - WINDOW_SAMPLES) // SHIFT_SAMPLES)


def at_speed(samples: Samples, percent: int) -> Samples:
    """Count the samples that are left at a speed: 110 % leaves ten elevenths."""
    return samples * 100 // percent
