"""The parts of a vocoder and of a codec: log-mel features, an encoder of them, a decoder to audio.

Legend: B utterances, S samples, T frames of a hop, U frames of two hops, F frequencies, M mel bins,
D model width.
"""

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from sbkit.audio.fbank import MIN_HZ, Hertz, NMels, require_no_empty_bin, triangles
from sbkit.audio.lengths import length_mask
from sbkit.base.ranges import Count, PositiveCount, Range
from sbkit.models.layers import Dropout, FrameConv, GlobalNorm

WINDOW_HOPS = 4  # also the number of windows that overlap at each sample
FRAME_HOPS = 2
MIN_MEL_MAGNITUDE = 1e-5  # the logarithm is taken of at least this, for audio between -1 and 1
MAX_LOG_MAGNITUDE = 6.0
Hop = Annotated[int, Range(low=2, integer=True, advice="200 is 12.5 ms at 16 kHz.")]
BLOCK_CONTEXT = 3  # frames that a block sees to each side


def fourier_basis(window: int) -> Tensor:
    """Return the matrix that weights a window by a Hann window and Fourier-transforms it.

    It is (window, 2 F): the real parts, then the imaginary parts.
    """
    spectra = torch.fft.rfft(torch.hann_window(window, dtype=torch.float64).diag())
    return torch.cat([spectra.real, spectra.imag], 1).float()


def inverse_basis(window: int) -> Tensor:
    """Return the matrix that inverts spectra of `fourier_basis`, (2 F, window), for overlap-add.

    The inverse transform is multiplied by the Hann window again. So a sample is weighted by the sum
    of the squared windows that overlap there, and the matrix is divided by this sum.
    """
    unit = torch.eye(window // 2 + 1, dtype=torch.float64)
    sum_of_squares = WINDOW_HOPS * 3 / 8  # the mean square of a Hann window is 3/8
    hann = torch.hann_window(window, dtype=torch.float64) / sum_of_squares
    return (torch.fft.irfft(torch.cat([unit, 1j * unit]), n=window) * hann).float()


def htk_filters(n_mels: int, *, hop: int, sample_rate: int) -> Tensor:
    """Return triangles of equal width on HTK's mel scale: (F, M)."""
    nyquist = sample_rate / 2
    lowest, highest = (2595.0 * math.log10(1.0 + hz / 700.0) for hz in (MIN_HZ, nyquist))
    mels = torch.linspace(lowest, highest, n_mels + 2)
    corners = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    return triangles(torch.linspace(0, sample_rate // 2, WINDOW_HOPS * hop // 2 + 1), corners)


def window_margins(hop: int) -> tuple[int, int]:
    """Return the samples of a window before and after the hop in its center."""
    margins = (WINDOW_HOPS - 1) * hop
    return margins // 2, margins - margins // 2


class LogMel(nn.Module):
    """Compute log-mel features of audio between -1 and 1, (B, S), (B,) -> (B, U, 2 M), (B,).

    Each hop has a window of four hops, centered on it. A frame concatenates the features of two
    hops. The last frame of an utterance may extend past its end; later frames are zero. The Fourier
    transform is a matrix product, because every runtime supports one.
    """

    basis: Tensor
    filters: Tensor

    def __init__(self, *, n_mels: NMels, hop: Hop, sample_rate: Hertz) -> None:
        super().__init__()
        self.hop_samples = hop
        self.frame_samples = FRAME_HOPS * hop
        self.sample_rate = sample_rate  # Hz
        make_filters = partial(htk_filters, hop=hop, sample_rate=sample_rate)
        require_no_empty_bin(make_filters, n_mels, f"a hop of {hop} at {sample_rate} Hz")
        self.register_buffer("basis", fourier_basis(WINDOW_HOPS * hop), persistent=False)
        self.register_buffer("filters", make_filters(n_mels), persistent=False)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        before, after = window_margins(self.hop_samples)
        tail = -audio.shape[1] % self.frame_samples  # completes the last frame
        padded = pad(audio, (before, after + tail))
        windows = padded.unfold(1, WINDOW_HOPS * self.hop_samples, self.hop_samples)
        real, imaginary = (windows @ self.basis).chunk(2, 2)  # (B, T, F)
        magnitudes = (real.square() + imaginary.square() + MIN_MEL_MAGNITUDE**2).sqrt()
        features = (magnitudes @ self.filters).clamp(min=MIN_MEL_MAGNITUDE).log()  # (B, T, M)
        stacked = features.reshape(features.shape[0], -1, FRAME_HOPS * features.shape[2])
        frames = (lengths + self.frame_samples - 1) // self.frame_samples
        return stacked * length_mask(frames, stacked.shape[1], stacked.device).unsqueeze(2), frames


class ConvNeXtBlock(nn.Module):
    """Mix neighboring frames, then channels: (B, U, D), (B, U, 1) -> (B, U, D).

    Dropout applies to the hidden units. Dropout of x would raise its variance in training only, and
    the layer norms divide by the standard deviation.
    Source: Liu et al. 2022, as used in Vocos (arXiv 2306.00814).
    """

    def __init__(self, d_model: int, d_ffn: int, *, scale: float, dropout: float) -> None:
        super().__init__()
        kernel = 2 * BLOCK_CONTEXT + 1
        self.conv = FrameConv(d_model, d_model, kernel, padding=BLOCK_CONTEXT, groups=d_model)
        self.norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, d_ffn)
        self.down = nn.Linear(d_ffn, d_model)
        self.dropout = Dropout(dropout)
        self.scale = nn.Parameter(torch.full((d_model,), scale))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = gelu(self.up(self.norm(self.conv(x * mask))))
        return x + self.scale * self.down(self.dropout(hidden))


class ConvNeXt(nn.ModuleList):
    """Run a stack of blocks that start near the identity: (B, U, D), (B, U, 1) -> (B, U, D)."""

    def __init__(self, num_blocks: int, d_model: int, d_ffn: int, dropout: float = 0.0) -> None:
        super().__init__()
        for _ in range(num_blocks):
            self.append(ConvNeXtBlock(d_model, d_ffn, scale=1 / num_blocks, dropout=dropout))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self:
            x = block(x, mask)
        return x


class VocoderEncoder(nn.Module):
    """Encode features: (B, U, 2 M), (B, U, 1) -> (B, U, D)."""

    def __init__(
        self,
        *,
        n_mels: PositiveCount,
        d_model: PositiveCount,
        d_ffn: PositiveCount,
        num_layers: Count,
    ) -> None:
        super().__init__()
        self.normalize = GlobalNorm(n_mels=FRAME_HOPS * n_mels)
        self.proj = nn.Linear(FRAME_HOPS * n_mels, d_model)
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn)
        self.norm = nn.LayerNorm(d_model)
        self.context = num_layers * BLOCK_CONTEXT + 1  # frames to each side

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.blocks(self.proj(self.normalize(features)), mask))


class VocoderDecoder(nn.Module):
    """Turn states into audio by an inverse Fourier transform: (B, U, D), (B, U, 1) -> (B, S).

    Source: Siuzdak 2023 (Vocos, arXiv 2306.00814).
    """

    inverse: Tensor

    def __init__(
        self,
        *,
        hop: Hop,
        d_model: PositiveCount,
        d_ffn: PositiveCount,
        num_layers: Count,
        num_fine_layers: Count,
    ) -> None:
        super().__init__()
        self.hop_samples = hop
        window = WINDOW_HOPS * hop
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn)
        self.upsample = nn.Linear(d_model, FRAME_HOPS * d_model)
        self.fine_blocks = ConvNeXt(num_fine_layers, d_model, d_ffn)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, window + 2)
        self.register_buffer("inverse", inverse_basis(window), persistent=False)
        # The fine blocks and the overlapping windows have a context in hops, the others in frames.
        fine_hops = num_fine_layers * BLOCK_CONTEXT + WINDOW_HOPS - 1
        fine_frames = math.ceil(fine_hops / FRAME_HOPS)
        self.context = num_layers * BLOCK_CONTEXT + fine_frames  # frames to each side

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        x = self.upsample(self.blocks(states, mask)).unflatten(2, (FRAME_HOPS, -1)).flatten(1, 2)
        fine_mask = mask.repeat_interleave(FRAME_HOPS, 1)  # (B, T, 1)
        x = self.head(self.norm(self.fine_blocks(x, fine_mask)))  # (B, T, 2 F)
        with torch.autocast(x.device.type, enabled=False):
            return self._invert(x.float(), fine_mask.float())

    def _invert(self, spectra: Tensor, mask: Tensor) -> Tensor:
        """Invert log-magnitudes and angles: (B, T, 2 F), (B, T, 1) -> (B, S)."""
        magnitudes, angles = spectra.chunk(2, 2)  # (B, T, F)
        magnitudes = magnitudes.clamp(max=MAX_LOG_MAGNITUDE).exp() * mask
        windows = torch.cat([magnitudes * angles.cos(), magnitudes * angles.sin()], 2)
        hops = (windows @ self.inverse).reshape(*windows.shape[:2], WINDOW_HOPS, self.hop_samples)
        # Hop n of window t is part of hop t + n of the output: four times (B, T + 3, hop).
        shifted = [pad(hops[:, :, n], (0, 0, n, WINDOW_HOPS - 1 - n)) for n in range(WINDOW_HOPS)]
        before, after = window_margins(self.hop_samples)
        return torch.stack(shifted).sum(0).flatten(1)[:, before:-after]
