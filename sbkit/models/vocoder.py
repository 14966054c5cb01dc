"""A vocoder, whose parts a codec shares: log-mel features, their encoder, a decoder to audio.

Legend: B utterances, S samples, T frames of a hop, U frames of two hops, F frequencies, M mel bins,
D model width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from sbkit.audio.lengths import length_mask
from sbkit.base.imports import import_torchaudio
from sbkit.config.ranges import Range
from sbkit.models.layers import Dropout, FrameConv, GlobalNorm

WINDOW_HOPS = 4  # also the number of windows that overlap at each sample
FRAME_HOPS = 2
MIN_MAGNITUDE = 1e-5  # under the logarithm, for audio between -1 and 1
MAX_LOG_MAGNITUDE = 6.0
BLOCK_CONTEXT = 3  # frames that a block sees to each side


def fourier_basis(window: int) -> Tensor:
    """Return the matrix that turns a window of samples into the spectrum of its Hann window."""
    spectra = torch.fft.rfft(torch.hann_window(window, dtype=torch.float64).diag())
    return torch.cat([spectra.real, spectra.imag], 1).float()


def inverse_basis(window: int) -> Tensor:
    """Return the matrix that turns spectra into Hann windows, which add up to the signal."""
    unit = torch.eye(window // 2 + 1, dtype=torch.float64)
    sum_of_squares = WINDOW_HOPS * 3 / 8
    hann = torch.hann_window(window, dtype=torch.float64) / sum_of_squares
    return (torch.fft.irfft(torch.cat([unit, 1j * unit]), n=window) * hann).float()


class LogMel(nn.Module):
    """Compute log-mel features, two hops side by side: (B, S), (B,) -> (B, U, 2 M), (B,).

    Windows of four hops are centered on their hop. The last frame may be partly filled; frames past
    a length are zero. The transform is a matrix product, which every runtime has.
    """

    basis: Tensor
    filters: Tensor
    RANGES: ClassVar = {"hop": Range(low=2, integer=True, advice="200 is 12.5 ms at 16 kHz.")}

    def __init__(self, *, n_mels: int, hop: int, sample_rate: int) -> None:
        super().__init__()
        self.hop, self.frame, self.sample_rate = hop, FRAME_HOPS * hop, sample_rate  # samples, Hz
        basis, highest = fourier_basis(WINDOW_HOPS * hop), sample_rate / 2
        functional = import_torchaudio("torchaudio.functional")
        bins = basis.shape[1] // 2
        filters = functional.melscale_fbanks(bins, 20.0, highest, n_mels, sample_rate)
        self.register_buffer("basis", basis, persistent=False)
        self.register_buffer("filters", filters, persistent=False)  # (F, M)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the features of audio between -1 and 1."""
        side, after = (WINDOW_HOPS - 1) * self.hop // 2, -audio.shape[1] % self.frame
        padded = pad(audio, (side, side + after))
        windows = padded.unfold(1, WINDOW_HOPS * self.hop, self.hop)
        real, imaginary = (windows @ self.basis).chunk(2, 2)  # (B, T, F)
        magnitudes = (real.square() + imaginary.square() + MIN_MAGNITUDE**2).sqrt()
        features = (magnitudes @ self.filters).clamp(min=MIN_MAGNITUDE).log()  # (B, T, M)
        pairs = features.reshape(features.shape[0], -1, FRAME_HOPS * features.shape[2])
        frames = (lengths + self.frame - 1) // self.frame
        return pairs * length_mask(frames, pairs.shape[1], pairs.device).unsqueeze(2), frames


class ConvNeXtBlock(nn.Module):
    """Mix neighboring frames, then channels: (B, U, D), (B, U, 1) -> (B, U, D).

    Dropout applies to the hidden units. Applied to x, it would raise the variance that the layer
    norms divide by, but only in training.
    Source: Liu et al. 2022, as used in Vocos (arXiv 2306.00814).
    """

    def __init__(self, d_model: int, d_ffn: int, *, scale: float, dropout: float) -> None:
        super().__init__()
        self.conv = FrameConv(
            d_model, d_model, 2 * BLOCK_CONTEXT + 1, padding=BLOCK_CONTEXT, groups=d_model
        )
        self.norm = nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ffn), nn.Linear(d_ffn, d_model)
        self.dropout = Dropout(dropout)
        self.scale = nn.Parameter(torch.full((d_model,), scale))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add to x; no frame sees those past the end of its utterance."""
        inner = self.down(self.dropout(gelu(self.up(self.norm(self.conv(x * mask))))))
        return x + self.scale * inner


class ConvNeXt(nn.ModuleList):
    """Run a stack of blocks that start near the identity: (B, U, D), (B, U, 1) -> (B, U, D)."""

    def __init__(self, count: int, d_model: int, d_ffn: int, dropout: float = 0.0) -> None:
        options = {"scale": 1 / count, "dropout": dropout}
        super().__init__(ConvNeXtBlock(d_model, d_ffn, **options) for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self:
            x = block(x, mask)
        return x


class VocoderEncoder(nn.Module):
    """Encode features: (B, U, 2 M), (B, U, 1) -> (B, U, D)."""

    def __init__(self, *, n_mels: int, d_model: int, d_ffn: int, num_layers: int) -> None:
        super().__init__()
        self.normalize = GlobalNorm(n_mels=FRAME_HOPS * n_mels)
        self.proj = nn.Linear(FRAME_HOPS * n_mels, d_model)
        self.blocks, self.norm = ConvNeXt(num_layers, d_model, d_ffn), nn.LayerNorm(d_model)
        self.context = num_layers * BLOCK_CONTEXT + 1  # frames to each side

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.blocks(self.proj(self.normalize(features)), mask))


class VocoderDecoder(nn.Module):
    """Turn states into audio by an inverse Fourier transform: (B, U, D), (B, U, 1) -> (B, S).

    Source: Siuzdak 2023 (Vocos, arXiv 2306.00814).
    """

    inverse: Tensor

    def __init__(
        self, *, hop: int, d_model: int, d_ffn: int, num_layers: int, num_fine_layers: int
    ) -> None:
        super().__init__()
        self.hop, window = hop, WINDOW_HOPS * hop
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn)
        self.upsample = nn.Linear(d_model, FRAME_HOPS * d_model)
        self.fine_blocks = ConvNeXt(num_fine_layers, d_model, d_ffn)
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, window + 2)
        self.register_buffer("inverse", inverse_basis(window), persistent=False)
        fine_hops = num_fine_layers * BLOCK_CONTEXT + WINDOW_HOPS - 1  # of blocks and windows
        self.context = num_layers * BLOCK_CONTEXT + -(
            -fine_hops // FRAME_HOPS
        )  # frames to each side

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Run the blocks, double the frames, and overlap-add the windows of their spectra."""
        x = self.upsample(self.blocks(states, mask)).unflatten(2, (FRAME_HOPS, -1)).flatten(1, 2)
        fine = mask.repeat_interleave(FRAME_HOPS, 1)
        x = self.head(self.norm(self.fine_blocks(x, fine)))  # (B, T, 2 F)
        with torch.autocast(x.device.type, enabled=False):
            return self._invert(x.float(), fine.float())

    def _invert(self, spectra: Tensor, mask: Tensor) -> Tensor:
        """Invert log-magnitudes and angles: (B, T, 2 F), (B, T, 1) -> (B, S)."""
        magnitudes, angles = spectra.chunk(2, 2)  # (B, T, F)
        magnitudes = magnitudes.clamp(max=MAX_LOG_MAGNITUDE).exp() * mask
        windows = torch.cat([magnitudes * angles.cos(), magnitudes * angles.sin()], 2)
        hops = (windows @ self.inverse).reshape(*windows.shape[:2], WINDOW_HOPS, self.hop)
        # The hops of each window, shifted by a hop per window: -> (B, T + 3, hop)
        shifted = [pad(hops[:, :, n], (0, 0, n, WINDOW_HOPS - 1 - n)) for n in range(WINDOW_HOPS)]
        side = (WINDOW_HOPS - 1) * self.hop // 2
        return torch.stack(shifted).sum(0).flatten(1)[:, side:-side]
