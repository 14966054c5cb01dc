"""What pretrained encoders are given, as the extractors of their families compute it.

Legend: B utterances, S samples, T frames of 10 ms, W samples of a window, K frequencies, M mel
bins.

Filters and windows are made in float64, as theirs are: with those of `Fbank`, torchaudio's of
float32, the quietest bins of real speech were up to 0.02 from w2v-BERT's, and with these 2e-6. A
trained model on the CPU makes its spectra in float64, as `Fbank` does; Parakeet's extractor, which
does not, is up to 1e-4 off in such bins.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.fbank import EPSILON, MIN_HZ, PREEMPHASIS, fft_samples
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import count_windows, length_mask
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.pretrained.blocks import Config, wide

Reals = npt.NDArray[np.float64]

POVEY, HANN = 0.85, 1.0  # powers of Hann's window
LEAST_VARIANCE = 1e-7  # added to that of audio, and of a mel bin of w2v-BERT's
LEAST_DEVIATION = 1e-5  # added to that of a mel bin of Parakeet's
LEAST_ENERGY = 2.0**-24  # added to that of a mel bin of Parakeet's


def centre(x: Tensor, lengths: Tensor, *, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Subtract the mean over a clip's own frames, and return the variance, too.

    (B, T, M), (B,) -> (B, T, M), (B, 1, M). What lies past a clip is zero.
    """
    mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
    count, dtype = mask.sum(1, keepdim=True), wide(x.device)
    mean = (x * mask).sum(1, keepdim=True, dtype=dtype) / count.clamp(min=1)
    centred = (x - mean.to(x.dtype)) * mask
    squares = centred.square().sum(1, keepdim=True, dtype=dtype)
    return centred, (squares / (count - correction).clamp(min=1)).to(x.dtype)


class NormalizedAudio(nn.Module):
    """Normalize each clip to mean 0 and variance 1: (B, S), (B,) -> (B, S, 1), (B,).

    Over its own samples; where ``do_normalize`` is false the audio stays as it is.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.do_normalize: bool = config["do_normalize"]

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize."""
        x = audio.unsqueeze(-1)
        if self.do_normalize:
            centred, variance = centre(x, lengths, correction=0)
            x = centred * (variance + LEAST_VARIANCE).rsqrt()
        return x, lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths: a frame is a sample."""
        return lengths


class LogMel(nn.Module):
    """Mel energies of windows, every ``shift`` samples one of ``size``.

    ``filters`` (K, M) is a constant, and in no checkpoint.
    """

    filters: Tensor

    def __init__(self, filters: Reals, *, size: int, shift: int) -> None:
        super().__init__()
        self.size, self.shift, self.n_fft = size, shift, 2 * (len(filters) - 1)
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)

    def precise(self, audio: Tensor) -> Tensor:
        """Return audio in the type that its spectra are made in."""
        return audio.double() if not self.training and audio.device.type == "cpu" else audio.float()

    def energies(self, windows: Tensor, taper: float) -> Tensor:
        """Compute mel energies in a power of Hann's window: (B, T, W) -> (B, T, M) of float32."""
        window = hann_window(self.size, taper, windows.dtype, windows.device)
        spectra = torch.fft.rfft(windows * window, self.n_fft)
        return torch.view_as_real(spectra).square().sum(-1).float() @ self.filters


class W2vBertFeatures(LogMel):
    """Compute Kaldi's features, normalized over a clip: (B, S) in +-1, (B,) -> (B, T, M), (B,)."""

    def __init__(self, config: Config) -> None:
        rate = config["sample_rate"]  # Hz
        filters = kaldi_filters(config["num_mel_bins"], rate)
        super().__init__(filters, size=window_samples(rate), shift=shift_samples(rate))

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them of whole windows, without their mean and with pre-emphasis."""
        if audio.shape[1] < self.size:  # so that a frame exists
            audio = pad(audio, (0, self.size - audio.shape[1]))
        windows = self.precise(audio * FULL_SCALE).unfold(1, self.size, self.shift)
        windows = windows - windows.mean(-1, keepdim=True)
        before = torch.cat([windows[..., :1], windows[..., :-1]], -1)
        features = self.energies(windows - PREEMPHASIS * before, POVEY).clamp(min=EPSILON).log()
        frames = self.frame_lengths(lengths)
        centred, variance = centre(features, frames)
        return centred * (variance + LEAST_VARIANCE).rsqrt(), frames

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the whole windows: (B,) -> (B,)."""
        return count_windows(lengths, self.size, self.shift)


class ParakeetFeatures(LogMel):
    """Compute them around every shift, normalized over a clip: (B, S) in +-1 -> (B, T, M), (B,)."""

    def __init__(self, config: Config) -> None:
        filters = slaney_filters(config["num_mel_bins"], config["n_fft"], config["sample_rate"])
        super().__init__(filters, size=config["win_length"], shift=config["hop_length"])
        self.preemphasis: float = config["preemphasis"]

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them of audio with pre-emphasis, zero beyond the ends of a clip."""
        audio = self.precise(audio)
        audio = audio - self.preemphasis * pad(audio[:, :-1], (1, 0))
        audio = audio * length_mask(lengths, audio.shape[1], audio.device)
        windows = pad(audio, (self.size // 2, self.size // 2)).unfold(1, self.size, self.shift)
        features = (self.energies(windows, HANN) + LEAST_ENERGY).log()
        frames = self.frame_lengths(lengths)
        centred, variance = centre(features, frames)
        return centred / (variance.sqrt() + LEAST_DEVIATION), frames

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the windows but the last, half of which lies beyond the end: (B,) -> (B,)."""
        return lengths // self.shift


@lru_cache(maxsize=8)  # a constant in an exported graph
def hann_window(size: int, taper: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a power of the symmetric Hann window: (W,)."""
    return torch.hann_window(size, periodic=False, dtype=dtype, device=device) ** taper


def kaldi_filters(n_mels: int, sample_rate: int) -> Reals:
    """Return triangles of equal width on Kaldi's mel scale, from 20 Hz on: (K, M)."""
    bins = np.linspace(0, sample_rate / 2, fft_samples(sample_rate) // 2 + 1)
    mel, lowest = 1127 * np.log1p(bins / 700), 1127 * np.log1p(MIN_HZ / 700)
    return _triangles(mel, np.linspace(lowest, mel[-1], n_mels + 2))


def slaney_filters(n_mels: int, n_fft: int, sample_rate: int) -> Reals:
    """Return triangles of equal area on the mel scale of Slaney's Auditory Toolbox: (K, M).

    It is linear up to 1000 Hz, which is 15 mel; beyond, 27 mel are a factor of 6.4.
    """
    highest = 15 + 27 * np.log(sample_rate / 2000) / np.log(6.4)
    mel = np.linspace(0, highest, n_mels + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    filters = _triangles(np.linspace(0, sample_rate / 2, n_fft // 2 + 1), edges)
    filters *= 2 / (edges[2:] - edges[:-2])
    return filters


def _triangles(bins: Reals, edges: Reals) -> Reals:
    """Return filters that rise from each edge to the next, and fall to the one after: (K, M)."""
    widths = np.diff(edges)
    rise = (bins[:, None] - edges[:-2]) / widths[:-1]
    fall = (edges[2:] - bins[:, None]) / widths[1:]
    filters: Reals = np.minimum(rise, fall).clip(min=0)
    return filters
