"""The input of wav2vec 2.0, HuBERT and WavLM, and Whisper's features.

Legend: B utterances, S samples, T features of 10 ms, W samples of a window, K frequencies, M mel
bins.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.fbank import triangles
from sbkit.audio.lengths import Subsampling, length_mask, sum_dtype
from sbkit.models.pretrained.blocks import Config

LOWEST_DECADE, RANGE_DECADES = -10.0, 8.0  # the lowest energy of Whisper; below the loudest
VARIANCE_EPS = 1e-7


class NormalizedAudio(nn.Module):
    """Normalize each clip, if ``do_normalize`` is true: (B, S), (B,) -> (B, S, 1), (B,).

    The zeros after a clip count, because users of transformers append them before the same step.
    In a tiny wav2vec 2.0, overfitted to 24 clips of 2 s, that changes the best token of 8 of 2,115
    frames.

    Sums are in float64, because onnxruntime adds numbers one by one: in float32, the variance of
    40 s of audio was so far off that log-probabilities changed by 6e-4.
    """

    subsampling = Subsampling(1)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.do_normalize: bool = config["do_normalize"]

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = audio.unsqueeze(-1)
        if self.do_normalize:
            mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)
            count = mask.sum(1, keepdim=True).clamp(min=1)
            dtype = sum_dtype(x.device)
            mean = (x * mask).sum(1, keepdim=True, dtype=dtype) / count
            centered = (x - mean.to(x.dtype)) * mask  # also an offset
            variance = centered.square().sum(1, keepdim=True, dtype=dtype) / count
            x = centered * (variance.to(x.dtype) + VARIANCE_EPS).rsqrt()
        return x, lengths


class WhisperFeatures(nn.Module):
    """Compute log energies of centered windows, limited from below by the loudest of the clip.

    (B, S) in +-1, (B,) -> (B, T, M), (B,). As in Whisper, a clip begins with its mirror image
    and is followed by silence; if it is 30 s long, by its mirror image. In evaluation on the CPU,
    spectra are computed in float64, as in `Fbank`.
    """

    filters: Tensor  # (K, M)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size: int = config["n_fft"]
        self.shift: int = config["hop_length"]
        filters = slaney_filters(config["num_mel_bins"], self.size, config["sample_rate"])
        self.register_buffer("filters", filters.float(), persistent=False)
        self.full_samples = 2 * config["max_source_positions"] * self.shift
        self.subsampling = Subsampling(self.shift, self.shift - 1)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if audio.shape[1] < 1:  # so that there is a frame
            audio = pad(audio, (0, 1))
        is_precise = not self.training and audio.device.type == "cpu"
        precise = audio.double() if is_precise else audio.float()
        windows = self._extend_ends(precise, lengths).unfold(1, self.size, self.shift)
        frames = self.subsampling.count(lengths)
        # Without negative numbers, whose division rounds towards zero in ONNX.
        windows = windows[:, : (audio.shape[1] + self.shift - 1) // self.shift]
        spectra = torch.fft.rfft(windows * hann_window(self.size, windows.dtype, windows.device))
        energies = torch.view_as_real(spectra).square().sum(-1).float() @ self.filters
        energies = energies.clamp(min=10**LOWEST_DECADE).log10()
        mask = length_mask(frames, energies.shape[1], audio.device).unsqueeze(-1)
        loudest = energies.where(mask, LOWEST_DECADE).amax((1, 2), keepdim=True)
        return (energies.maximum(loudest - RANGE_DECADES) + 4) / 4 * mask, frames

    def _extend_ends(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Add half a window to both ends: (B, S), (B,) -> (B, S + W)."""
        half = self.size // 2
        lengths = lengths.to(audio.device, non_blocking=True).unsqueeze(1)
        end = lengths.clamp(min=self.full_samples)
        positions = torch.arange(-half, audio.shape[1] + half, device=audio.device).abs()
        positions = torch.where(positions < end, positions, 2 * (end - 1) - positions)
        samples = audio.gather(1, positions.clamp(min=0, max=audio.shape[1] - 1))
        return samples * (positions < lengths)


@lru_cache(maxsize=8)  # so that it is a constant in an exported graph
def hann_window(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the window of Hann: (W,)."""
    return torch.hann_window(size, dtype=dtype, device=device)


def slaney_filters(n_mels: int, n_fft: int, sample_rate: int) -> Tensor:
    """Return triangles of equal area on the mel scale of Slaney's Auditory Toolbox: (K, M).

    The scale is linear up to 1000 Hz, which is 15 mel; above, 27 mel are a factor of 6.4.
    """
    highest = 15 + 27 * np.log(sample_rate / 2000) / np.log(6.4)
    mel = np.linspace(0, highest, n_mels + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    bins = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    areas = (edges[2:] - edges[:-2]) / 2
    return triangles(torch.from_numpy(bins), torch.from_numpy(edges)) / torch.from_numpy(areas)
