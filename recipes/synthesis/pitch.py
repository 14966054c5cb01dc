"""The fundamental frequency of a voice, by the autocorrelation of windowed frames.

Legend: S samples, U frames, W samples of a window, N lags, K candidates.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples

MIN_HZ, MAX_HZ = 70.0, 450.0
WINDOW_SECONDS = 0.05  # more than three periods of the lowest pitch
NUM_CANDIDATES = 8  # of a frame, besides "unvoiced"
UNVOICED_STRENGTH = 0.5  # voiced frames have a higher autocorrelation at their period
MIN_AMPLITUDE = 0.02  # of the loudest frame's
# Costs are in units of autocorrelation; costs of transitions are for frames 10 ms apart.
OCTAVE_COST = 0.03  # per octave below MAX_HZ: without it, twice a period is as good as one
JUMP_COST = 0.75  # per octave; Boersma's 0.35 leaves 1.5 times as many jumps
VOICING_COST = 0.14  # between a frame with a pitch and one without

Hertz = npt.NDArray[np.float32]


def track_pitch(samples: Samples, sample_rate: int, frame: int) -> Hertz:
    """Return the pitch of each frame of samples, 0 if unvoiced: (S,) -> (U,).

    Source: Boersma 1993 (Praat's `To Pitch (ac)`): the best path through the frames' candidates.
    """
    width = round(WINDOW_SECONDS * sample_rate) // 2 * 2
    count = max(1, -(-len(samples) // frame))
    side = (width - frame) // 2
    padded = np.pad(samples.astype(np.float32) / FULL_SCALE, (side, width + frame))
    frames = np.lib.stride_tricks.sliding_window_view(padded, width)[: count * frame : frame]
    frames = frames - frames.mean(1, keepdims=True)  # (U, W)
    window = np.hanning(width).astype(np.float32)
    correlation = _autocorrelation(frames * window) / _autocorrelation(window)
    lags = np.arange(int(sample_rate / MAX_HZ), int(sample_rate / MIN_HZ) + 2)
    before, at, after = (correlation[:, lags + shift] for shift in (-1, 0, 1))  # (U, N)
    is_peak = (at >= before) & (at > after)
    levels = np.abs(frames).max(1, keepdims=True)
    is_peak &= levels > MIN_AMPLITUDE * levels.max(initial=0)
    strengths = np.where(is_peak, at - OCTAVE_COST * np.log2(lags * MAX_HZ / sample_rate), -1)
    shifts = 0.5 * (before - after) / np.minimum(before - 2 * at + after, -1e-6)
    best = np.argpartition(strengths, -NUM_CANDIDATES, axis=1)[:, -NUM_CANDIDATES:]  # (U, K)
    hertz = sample_rate / np.take_along_axis(lags + shifts.clip(-0.5, 0.5), best, 1)
    per_frame = 0.01 * sample_rate / frame
    return _best_path(hertz, np.take_along_axis(strengths, best, 1), per_frame)


def _best_path(hertz: npt.NDArray[Any], strengths: npt.NDArray[Any], scale: float) -> Hertz:
    """Choose a candidate for each frame, or unvoiced: (U, K), (U, K) -> (U,).

    scale: multiplies the costs of transitions.
    """
    hertz = np.pad(hertz, ((0, 0), (1, 0)))
    strengths = np.pad(strengths, ((0, 0), (1, 0)), constant_values=UNVOICED_STRENGTH)
    octaves, voiced = np.log2(np.maximum(hertz, MIN_HZ)), hertz > 0
    cost = JUMP_COST * np.abs(octaves[1:, None] - octaves[:-1, :, None])  # (U - 1, K, K)
    cost = np.where(voiced[1:, None] == voiced[:-1, :, None], cost, VOICING_COST)
    total = strengths[0]
    origins: list[npt.NDArray[np.intp]] = []
    for strength, change in zip(strengths[1:], cost, strict=True):
        sums = total[:, None] - scale * change
        origins.append(sums.argmax(0))
        total = sums.max(0) + strength
    path = [int(total.argmax())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    pitch: Hertz = hertz[np.arange(len(hertz)), path[::-1]].astype(np.float32)
    return pitch


def _autocorrelation(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the autocorrelation by lag, 1 at lag 0: (..., W) -> (..., W)."""
    size = 2 * x.shape[-1]
    power = np.square(np.abs(np.fft.rfft(x, size)))
    correlation = np.fft.irfft(power, size)[..., : x.shape[-1]]
    normalized: npt.NDArray[Any] = correlation / np.maximum(correlation[..., :1], 1e-9)
    return normalized


def interpolate(pitch: Hertz) -> Hertz:
    """Interpolate octaves linearly between voiced frames: (U,) -> (U,).

    A clip without a voiced frame becomes MIN_HZ.
    """
    voiced = np.flatnonzero(pitch)
    if not len(voiced):
        return np.full_like(pitch, MIN_HZ)
    octaves = np.interp(np.arange(len(pitch)), voiced, np.log2(pitch[voiced]))
    hertz: Hertz = np.exp2(octaves).astype(np.float32)
    return hertz
