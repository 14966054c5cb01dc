"""The features of pretrained encoders, as the extractors of their families compute them.

Legend: B utterances, S samples, T frames of 10 ms, W samples of a window, K frequencies, M mel
bins.

Filters and windows are computed in float64, as in the extractors. With filters in float32, the
quietest bins of real speech differed from w2v-BERT's by up to 0.02; with these, by 2e-6. In
evaluation on the CPU, spectra are also computed in float64, as in `Fbank`; Parakeet's extractor
computes them in float32, which differs by up to 1e-4.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.fbank import EPSILON, MIN_HZ, PREEMPHASIS, fft_samples
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import Subsampling, length_mask, widest_float
from sbkit.base.arrays import Float64s
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.pretrained.blocks import Config

POVEY_POWER, HANN_POWER = 0.85, 1.0  # exponents of Hann's window
LOWEST_DECADE, RANGE_DECADES = -10.0, 8.0  # of Whisper's energies; below the loudest
VARIANCE_EPS = 1e-7  # for audio, and the mel bins of w2v-BERT
DEVIATION_EPS, ENERGY_EPS = 1e-5, 2.0**-24  # for the mel bins of Parakeet


def center(x: Tensor, lengths: Tensor, *, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Center x over a clip's own frames, and return the variance.

    (B, T, M), (B,) -> (B, T, M), (B, 1, M). Sums are in float64, because onnxruntime adds numbers
    one by one: in float32, the variance of 40 s of audio was so far off that log-probabilities
    changed by 6e-4.
    """
    mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
    count = mask.sum(1, keepdim=True)
    dtype = widest_float(x.device)
    mean = (x * mask).sum(1, keepdim=True, dtype=dtype) / count.clamp(min=1)
    centered = x - mean.to(x.dtype)
    squares = (centered * mask).square().sum(1, keepdim=True, dtype=dtype)
    return centered, (squares / (count - correction).clamp(min=1)).to(x.dtype)


class NormalizedAudio(nn.Module):
    """Normalize each clip, if ``do_normalize`` is true: (B, S), 2 x (B,) -> (B, S, 1), (B,)."""

    subsampling = Subsampling(1)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.do_normalize: bool = config["do_normalize"]

    def forward(self, audio: Tensor, lengths: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        x = audio.unsqueeze(-1)
        if self.do_normalize:
            centered, variance = center(x, measured, correction=0)
            x = centered * (variance + VARIANCE_EPS).rsqrt()
            x = x * length_mask(measured, x.shape[1], x.device).unsqueeze(-1)  # also an offset
        return x, lengths


class MelEnergies(nn.Module):
    """Compute mel energies of windows of ``size`` samples, one every ``shift`` samples."""

    filters: Tensor  # (K, M)
    is_periodic = False  # the window

    def __init__(self, filters: Float64s, *, size: int, shift: int) -> None:
        super().__init__()
        self.size = size
        self.shift = shift
        self.n_fft = 2 * (len(filters) - 1)
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)

    def as_precise(self, audio: Tensor) -> Tensor:
        return audio.double() if not self.training and audio.device.type == "cpu" else audio.float()

    def energies(self, windows: Tensor, power: float) -> Tensor:
        """Weight windows by a power of Hann's: (B, T, W) -> (B, T, M) of float32."""
        dtype, device = windows.dtype, windows.device
        window = hann_window(self.size, power, dtype, device, periodic=self.is_periodic)
        spectra = torch.fft.rfft(windows * window, self.n_fft)
        return torch.view_as_real(spectra).square().sum(-1).float() @ self.filters


class W2vBertFeatures(MelEnergies):
    """Compute Kaldi's normalized features: (B, S) in +-1, 2 x (B,) -> (B, T, M), (B,)."""

    def __init__(self, config: Config) -> None:
        rate = config["sample_rate"]  # Hz
        filters = kaldi_filters(config["num_mel_bins"], rate)
        super().__init__(filters, size=window_samples(rate), shift=shift_samples(rate))
        self.subsampling = Subsampling.of_windows(self.size, self.shift)

    def forward(self, audio: Tensor, lengths: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        if audio.shape[1] < self.size:  # so that there is a frame
            audio = pad(audio, (0, self.size - audio.shape[1]))
        windows = self.as_precise(audio * FULL_SCALE).unfold(1, self.size, self.shift)
        windows = windows - windows.mean(-1, keepdim=True)
        previous = torch.cat([windows[..., :1], windows[..., :-1]], -1)
        energies = self.energies(windows - PREEMPHASIS * previous, POVEY_POWER)
        energies = energies.clamp(min=EPSILON).log()
        centered, variance = center(energies, self.subsampling.count(measured))
        return centered * (variance + VARIANCE_EPS).rsqrt(), self.subsampling.count(lengths)


class ParakeetFeatures(MelEnergies):
    """Normalize features of centered windows: (B, S) in +-1, 2 x (B,) -> (B, T, M), (B,)."""

    def __init__(self, config: Config) -> None:
        filters = slaney_filters(config["num_mel_bins"], config["n_fft"], config["sample_rate"])
        super().__init__(filters, size=config["win_length"], shift=config["hop_length"])
        self.preemphasis: float = config["preemphasis"]
        self.subsampling = Subsampling(self.shift)  # half of the last window lies past the end

    def forward(self, audio: Tensor, lengths: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        audio = self.as_precise(audio)
        audio = audio - self.preemphasis * pad(audio[:, :-1], (1, 0))
        audio = audio * length_mask(measured, audio.shape[1], audio.device)
        windows = pad(audio, (self.size // 2, self.size // 2)).unfold(1, self.size, self.shift)
        energies = self.energies(windows, HANN_POWER)
        energies = (energies + ENERGY_EPS).log()
        centered, variance = center(energies, self.subsampling.count(measured))
        return centered / (variance.sqrt() + DEVIATION_EPS), self.subsampling.count(lengths)


class WhisperFeatures(MelEnergies):
    """Compute log energies of centered windows, limited from below by the loudest of the clip.

    (B, S) in +-1, 2 x (B,) -> (B, T, M), (B,). As in Whisper, a clip begins with its mirror image
    and is followed by silence; if it is 30 s long, by its mirror image.
    """

    is_periodic = True

    def __init__(self, config: Config) -> None:
        filters = slaney_filters(config["num_mel_bins"], config["n_fft"], config["sample_rate"])
        super().__init__(filters, size=config["n_fft"], shift=config["hop_length"])
        self.full_samples = 2 * config["max_source_positions"] * self.shift
        self.subsampling = Subsampling(self.shift, self.shift - 1)

    def forward(self, audio: Tensor, lengths: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        if audio.shape[1] < 1:  # so that there is a frame
            audio = pad(audio, (0, 1))
        windows = self._extended(self.as_precise(audio), lengths).unfold(1, self.size, self.shift)
        frames = self.subsampling.count(lengths)
        # Without negative numbers, whose division rounds towards zero in ONNX.
        windows = windows[:, : (audio.shape[1] + self.shift - 1) // self.shift]
        energies = self.energies(windows, HANN_POWER).clamp(min=10**LOWEST_DECADE).log10()
        counted = length_mask(self.subsampling.count(measured), energies.shape[1], audio.device)
        loudest = energies.where(counted.unsqueeze(-1), LOWEST_DECADE).amax((1, 2), keepdim=True)
        mask = length_mask(frames, energies.shape[1], audio.device).unsqueeze(-1)
        return (energies.maximum(loudest - RANGE_DECADES) + 4) / 4 * mask, frames

    def _extended(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Add half a window to both ends: (B, S), (B,) -> (B, S + W)."""
        half = self.size // 2
        lengths = lengths.to(audio.device, non_blocking=True).unsqueeze(1)
        end = lengths.clamp(min=self.full_samples)
        positions = torch.arange(-half, audio.shape[1] + half, device=audio.device).abs()
        positions = torch.where(positions < end, positions, 2 * (end - 1) - positions)
        samples = audio.gather(1, positions.clamp(min=0, max=audio.shape[1] - 1))
        return samples * (positions < lengths)


@lru_cache(maxsize=8)  # so that it is a constant in an exported graph
def hann_window(
    size: int, power: float, dtype: torch.dtype, device: torch.device, *, periodic: bool
) -> Tensor:
    """Return a power of the Hann window, symmetric unless it is periodic: (W,)."""
    return torch.hann_window(size, periodic=periodic, dtype=dtype, device=device) ** power


def kaldi_filters(n_mels: int, sample_rate: int) -> Float64s:
    """Return triangles of equal width on Kaldi's mel scale, starting at 20 Hz: (K, M)."""
    bins = np.linspace(0, sample_rate / 2, fft_samples(sample_rate) // 2 + 1)
    mel = 1127 * np.log1p(bins / 700)
    lowest = 1127 * np.log1p(MIN_HZ / 700)
    return _triangles(mel, np.linspace(lowest, mel[-1], n_mels + 2))


def slaney_filters(n_mels: int, n_fft: int, sample_rate: int) -> Float64s:
    """Return triangles of equal area on the mel scale of Slaney's Auditory Toolbox: (K, M).

    The scale is linear up to 1000 Hz, which is 15 mel; above, 27 mel are a factor of 6.4.
    """
    highest = 15 + 27 * np.log(sample_rate / 2000) / np.log(6.4)
    mel = np.linspace(0, highest, n_mels + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    filters = _triangles(np.linspace(0, sample_rate / 2, n_fft // 2 + 1), edges)
    filters *= 2 / (edges[2:] - edges[:-2])
    return filters


def _triangles(bins: Float64s, edges: Float64s) -> Float64s:
    """Return filters that rise from each edge to the next, and fall to the one after it: (K, M)."""
    widths = np.diff(edges)
    rise = (bins[:, None] - edges[:-2]) / widths[:-1]
    fall = (edges[2:] - bins[:, None]) / widths[1:]
    return np.minimum(rise, fall).clip(min=0)
