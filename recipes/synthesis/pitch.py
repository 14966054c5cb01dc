"""The fundamental frequency of a voice, by the autocorrelation of windowed frames.

Legend: S samples, U frames, W samples of a window, N lags.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples

LOWEST, HIGHEST = 70.0, 450.0  # Hz
WINDOW = 0.05  # seconds: more than three periods of the lowest
VOICED = 0.5  # autocorrelation at the period, of a frame that is voiced
QUIET = 0.02  # of the loudest frame's amplitude
OCTAVE_COST = 0.03  # of autocorrelation, so that of two periods the shorter is taken

Hertz = npt.NDArray[np.float32]


def track_pitch(samples: Samples, sample_rate: int, frame: int) -> Hertz:
    """Return the pitch of each frame of samples, 0 where it is not voiced: (S,) -> (U,).

    Source: Boersma 1993, without its search for a path; medians of three frames instead.
    """
    width = round(WINDOW * sample_rate) // 2 * 2
    count = max(1, -(-len(samples) // frame))
    side = (width - frame) // 2
    padded = np.pad(samples.astype(np.float32) / FULL_SCALE, (side, width + frame))
    frames = np.lib.stride_tricks.sliding_window_view(padded, width)[: count * frame : frame]
    frames = frames - frames.mean(1, keepdims=True)  # (U, W)
    window = np.hanning(width).astype(np.float32)
    found = _autocorrelation(frames * window) / _autocorrelation(window)
    lags = np.arange(int(sample_rate / HIGHEST), int(sample_rate / LOWEST) + 2)
    candidates = found[:, lags] - OCTAVE_COST * np.log2(lags * HIGHEST / sample_rate)
    is_peak = np.zeros_like(candidates, bool)
    is_peak[:, 1:-1] = (candidates[:, 1:-1] >= candidates[:, :-2]) & (
        candidates[:, 1:-1] > candidates[:, 2:]
    )
    best = np.where(is_peak, candidates, -1).argmax(1)
    rows = np.arange(count)
    before, at, after = (found[rows, lags[best] + shift] for shift in (-1, 0, 1))
    shift = 0.5 * (before - after) / np.minimum(before - 2 * at + after, -1e-6)
    levels = np.abs(frames).max(1)
    is_voiced = (at > VOICED) & is_peak[rows, best] & (levels > QUIET * levels.max(initial=0))
    hertz = np.where(is_voiced, sample_rate / (lags[best] + shift.clip(-0.5, 0.5)), 0)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(hertz, 1, mode="edge"), 3)
    median: Hertz = np.median(around, axis=1).astype(np.float32)
    return median


def _autocorrelation(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return it by lag, 1 at lag 0: (..., W) -> (..., W)."""
    size = 2 * x.shape[-1]
    power = np.square(np.abs(np.fft.rfft(x, size)))
    found = np.fft.irfft(power, size)[..., : x.shape[-1]]
    normalized: npt.NDArray[Any] = found / np.maximum(found[..., :1], 1e-9)
    return normalized


def continuous(pitch: Hertz) -> Hertz:
    """Join the voiced frames by lines over the octaves, for frames without a pitch: (U,) -> (U,).

    A clip without any voiced frame has LOWEST everywhere.
    """
    voiced = np.flatnonzero(pitch)
    if not len(voiced):
        return np.full_like(pitch, LOWEST)
    octaves = np.interp(np.arange(len(pitch)), voiced, np.log2(pitch[voiced]))
    joined: Hertz = np.exp2(octaves).astype(np.float32)
    return joined
