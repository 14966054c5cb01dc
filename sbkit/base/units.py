"""Convert between seconds, samples and frames, with the roundings that all files share.

Windows follow Kaldi's filterbanks, which deployed runtimes compute: 25 ms every 10 ms, and only
windows that lie entirely within the audio.
"""

from typing import TypeVar

import numpy as np

from sbkit.base.arrays import Counts

SampleCounts = TypeVar("SampleCounts", int, Counts)  # one count, or an array of them

SAMPLE_RATE = 16_000  # samples per second, unless a YAML says otherwise
WINDOW_MS = 25
SHIFT_MS = 10
MICROSECONDS = 1_000_000  # in a second


def window_samples(sample_rate: int = SAMPLE_RATE) -> int:
    """Count the samples of an analysis window, rounded down as Kaldi does."""
    return sample_rate * WINDOW_MS // 1000


def shift_samples(sample_rate: int = SAMPLE_RATE) -> int:
    """Count the samples from one analysis window to the next, rounded down as Kaldi does."""
    return sample_rate * SHIFT_MS // 1000


def seconds_to_samples(seconds: float, sample_rate: int) -> int:
    """Round a duration to the nearest sample."""
    return round(seconds * sample_rate)


def microseconds_to_samples(microseconds: int, sample_rate: int) -> int:
    """Round a time to the nearest sample, and half a sample up, in whole numbers."""
    return (2 * microseconds * sample_rate + MICROSECONDS) // (2 * MICROSECONDS)


def samples_to_seconds(samples: int, sample_rate: int) -> float:
    """Return the exact duration of a number of samples."""
    return samples / sample_rate


def at_speed(samples: SampleCounts, percent: SampleCounts | int) -> SampleCounts:
    """Count the samples left after a change of speed: 110 % leaves ten elevenths."""
    return samples * 100 // percent


def frames_needed(tokens: Counts, lengths: Counts) -> Counts:
    """Count the frames that CTC needs for each of N texts: one per token, and one per repeat.

    tokens: all texts, concatenated; lengths: the tokens of each text, (N,) -> (N,).
    """
    texts = np.repeat(np.arange(len(lengths)), lengths)
    is_repeat = (tokens[1:] == tokens[:-1]) & (texts[1:] == texts[:-1])  # needs a blank before it
    return lengths + np.bincount(texts[1:][is_repeat], minlength=len(lengths))
