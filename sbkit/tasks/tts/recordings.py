"""Recordings, as a TTS model learns and is measured: without silence around, with their pitch.

Legend: B utterances, S samples, L symbols, U frames of the features; of pitch tracking: W samples
of a window, N lags, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.audio.segments import WINDOWS_PER_SECOND, find_pauses
from sbkit.base.arrays import Array
from sbkit.base.units import seconds_to_samples
from sbkit.data.batch import Batch, collate_audio
from sbkit.data.shard import Row
from sbkit.tasks.tts.symbols import PAUSE_SYMBOLS, to_symbols
from sbkit.text.vocabulary import ClassLabels

PITCH_VERSION = 1  # raised with each change of pitch
MIN_PITCH_HZ, MAX_PITCH_HZ = 70.0, 450.0
WINDOW_SECONDS = 0.05  # more than three periods of the lowest pitch
NUM_CANDIDATES = 8  # of a frame, besides "unvoiced"
UNVOICED_STRENGTH = 0.5  # voiced frames have a higher autocorrelation at their period
MIN_AMPLITUDE = 0.02  # of the loudest frame's
# Costs are in units of autocorrelation; costs of transitions are for frames 10 ms apart.
OCTAVE_COST = 0.03  # per octave below MAX_PITCH_HZ: without it, twice a period is as good as one
JUMP_COST = 0.75  # per octave; Boersma's 0.35 leaves 1.5 times as many jumps
VOICING_COST = 0.14  # between a frame with a pitch and one without

SYMBOLS, PITCH = "symbols", "pitch"  # columns: the spelled-out text, and Hz of each frame
MARGIN_WINDOWS = 2  # of 20 ms, kept of the silence around a clip
REFERENCE_HZ = 150.0  # octaves are counted from here

Hertz = npt.NDArray[np.float32]


def track_pitch(samples: Samples, sample_rate: int, frame: int) -> Hertz:
    """Return the pitch of each frame of samples, 0 if unvoiced: (S,) -> (U,).

    Source: Boersma 1993 (Praat's `To Pitch (ac)`): the best path through the frames' candidates.
    """
    width = seconds_to_samples(WINDOW_SECONDS, sample_rate) // 2 * 2
    count = max(1, -(-len(samples) // frame))
    side = (width - frame) // 2
    padded = np.pad(samples.astype(np.float32) / FULL_SCALE, (side, width + frame))
    frames = np.lib.stride_tricks.sliding_window_view(padded, width)[: count * frame : frame]
    frames = frames - frames.mean(1, keepdims=True)  # (U, W)
    window = np.hanning(width).astype(np.float32)
    correlation = _autocorrelation(frames * window) / _autocorrelation(window)
    lags = np.arange(int(sample_rate / MAX_PITCH_HZ), int(sample_rate / MIN_PITCH_HZ) + 2)
    before, at, after = (correlation[:, lags + shift] for shift in (-1, 0, 1))  # (U, N)
    is_peak = (at >= before) & (at > after)
    levels = np.abs(frames).max(1, keepdims=True)
    is_peak &= levels > MIN_AMPLITUDE * levels.max(initial=0)
    strengths = np.where(is_peak, at - OCTAVE_COST * np.log2(lags * MAX_PITCH_HZ / sample_rate), -1)
    shifts = 0.5 * (before - after) / np.minimum(before - 2 * at + after, -1e-6)
    best = np.argpartition(strengths, -NUM_CANDIDATES, axis=1)[:, -NUM_CANDIDATES:]  # (U, K)
    hertz = sample_rate / np.take_along_axis(lags + shifts.clip(-0.5, 0.5), best, 1)
    per_frame = 0.01 * sample_rate / frame
    return _best_path(hertz, np.take_along_axis(strengths, best, 1), per_frame)


def _best_path(hertz: Array, strengths: Array, scale: float) -> Hertz:
    """Choose a candidate for each frame, or unvoiced: (U, K), (U, K), scale of costs -> (U,)."""
    hertz = np.pad(hertz, ((0, 0), (1, 0)))
    strengths = np.pad(strengths, ((0, 0), (1, 0)), constant_values=UNVOICED_STRENGTH)
    octaves = np.log2(np.maximum(hertz, MIN_PITCH_HZ))
    voiced = hertz > 0
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


def _autocorrelation(x: Array) -> Array:
    """Return the autocorrelation by lag, 1 at lag 0: (..., W) -> (..., W)."""
    size = 2 * x.shape[-1]
    power = np.square(np.abs(np.fft.rfft(x, size)))
    correlation = np.fft.irfft(power, size)[..., : x.shape[-1]]
    normalized: Array = correlation / np.maximum(correlation[..., :1], 1e-9)
    return normalized


def pitch_text(samples: Samples, sample_rate: int, frame: int) -> str:
    """Return the column `pitch` of a clip."""
    return " ".join(f"{hertz:.0f}" for hertz in track_pitch(samples, sample_rate, frame))


def interpolate(pitch: Hertz) -> Hertz:
    """Interpolate octaves between voiced frames; without any, MIN_PITCH_HZ: (U,) -> (U,)."""
    voiced = np.flatnonzero(pitch)
    if not len(voiced):
        return np.full_like(pitch, MIN_PITCH_HZ)
    octaves = np.interp(np.arange(len(pitch)), voiced, np.log2(pitch[voiced]))
    hertz: Hertz = np.exp2(octaves).astype(np.float32)
    return hertz


@dataclass(frozen=True, kw_only=True)
class SpokenBatch(Batch):
    """Clips without the silence around them."""

    ON_DEVICE = (*Batch.ON_DEVICE, "symbols", "is_pause", "octaves", "voiced")

    symbols: Tensor  # (B, L)
    symbol_lengths: Tensor  # (B,)
    is_pause: Tensor  # (B, L)
    octaves: Tensor  # (B, U) the pitch above REFERENCE_HZ, interpolated between voiced frames
    voiced: Tensor  # (B, U)


@dataclass(frozen=True)
class SpokenCollate:
    """Pad utterances to a batch, without symbols that no training clip has."""

    symbols: ClassLabels
    sample_rate: int
    frame: int

    def __call__(self, rows: Sequence[Row]) -> SpokenBatch:
        trimmed: list[Row] = []
        pitches: list[Tensor] = []
        for row in rows:
            start, end = self._trim(row["audio"])
            trimmed.append({**row, "audio": row["audio"][start:end], "samples": end - start})
            hertz = np.array(row[PITCH].split(), np.float32)
            pitches.append(torch.from_numpy(hertz[start // self.frame : -(-end // self.frame)]))
        names = self.symbols.names
        trained = set(names)
        texts = [[s for s in to_symbols(row[SYMBOLS]) if s in trained] or names[:1] for row in rows]
        ids = [torch.tensor([*map(self.symbols.encode, text)]) for text in texts]
        is_pause = [torch.tensor([symbol in PAUSE_SYMBOLS for symbol in text]) for text in texts]
        octaves = [
            torch.from_numpy(interpolate(pitch.numpy()) / REFERENCE_HZ).log2() for pitch in pitches
        ]
        return SpokenBatch(
            **collate_audio(trimmed, self.sample_rate),
            symbols=pad_sequence(ids, batch_first=True),
            symbol_lengths=torch.tensor([*map(len, ids)]),
            is_pause=pad_sequence(is_pause, batch_first=True),
            octaves=pad_sequence(octaves, batch_first=True),
            voiced=pad_sequence(pitches, batch_first=True) > 0,
        )

    def _trim(self, samples: Samples) -> tuple[int, int]:
        """Return the start of speech, at a whole frame, and its end, in samples."""
        window = self.sample_rate // WINDOWS_PER_SECOND
        count = len(samples) // window
        pauses = find_pauses(samples, window)
        start = pauses[0][1] - MARGIN_WINDOWS if pauses and pauses[0][0] == 0 else 0
        end = pauses[-1][0] + MARGIN_WINDOWS if pauses and pauses[-1][1] == count else count + 1
        if end - start <= 2 * MARGIN_WINDOWS:  # the whole clip is silence
            return 0, len(samples)
        first = max(0, start) * window // self.frame * self.frame
        return first, min(end * window, len(samples))
