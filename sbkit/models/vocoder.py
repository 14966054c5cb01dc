"""TODO."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torchaudio.functional import melscale_fbanks

from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import Range
from sbkit.models.layers import Dropout, FrameConv, GlobalNorm

OVERLAP = 4  # windows over each sample
PER_CODE = 2  # hops of a frame of codes
FLOOR = 1e-5  # under the logarithm, of audio between -1 and 1
LOUDEST = 6.0  # logarithm of a magnitude
REACH = 3  # frames that a block sees to each side


def fourier_basis(window: int) -> Tensor:
    """Return what a Hann window of samples is multiplied by for its spectrum: (window, 2 F)."""
    spectra = torch.fft.rfft(torch.hann_window(window, dtype=torch.float64).diag())
    return torch.cat([spectra.real, spectra.imag], 1).float()


def inverse_basis(window: int) -> Tensor:
    """Return what makes Hann windows of spectra, which add up to the signal: (2 F, window)."""
    each = torch.eye(window // 2 + 1, dtype=torch.float64)
    hann = torch.hann_window(window, dtype=torch.float64) / (OVERLAP * 3 / 8)  # its squares' sum
    basis: Tensor = torch.fft.irfft(torch.cat([each, 1j * each]), n=window) * hann
    return basis.float()


class LogMel(nn.Module):
    """Compute log-mel features, two hops side by side: (B, S), (B,) -> (B, U, 2 M), (B,).

    Windows of four hops are centred on their hop; U is the samples divided by those of a frame,
    rounded up. Frames past a length are zero. A product of matrices is what every runtime has.
    """

    basis: Tensor
    filters: Tensor
    RANGES: ClassVar = {"hop": Range(low=2, whole=True, advice="200 is 12.5 ms at 16 kHz.")}

    def __init__(self, *, n_mels: int, hop: int, sample_rate: int) -> None:
        super().__init__()
        self.hop, self.sample_rate, self.frame = hop, sample_rate, PER_CODE * hop  # samples
        basis, highest = fourier_basis(OVERLAP * hop), sample_rate / 2
        filters = melscale_fbanks(basis.shape[1] // 2, 20.0, highest, n_mels, sample_rate)
        self.register_buffer("basis", basis, persistent=False)
        self.register_buffer("filters", filters, persistent=False)  # (F, M)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute those of audio between -1 and 1."""
        side, after = (OVERLAP - 1) * self.hop // 2, -audio.shape[1] % self.frame
        padded = pad(audio, (side, side + after))
        windows = padded.unfold(1, OVERLAP * self.hop, self.hop)
        real, imaginary = (windows @ self.basis).chunk(2, 2)  # (B, T, F)
        magnitudes = (real.square() + imaginary.square() + FLOOR**2).sqrt()
        features = (magnitudes @ self.filters).clamp(min=FLOOR).log()  # (B, T, M)
        pairs = features.reshape(features.shape[0], -1, PER_CODE * features.shape[2])
        frames = (lengths + self.frame - 1) // self.frame
        return pairs * length_mask(frames, pairs.shape[1], pairs.device).unsqueeze(2), frames


class ConvNeXtBlock(nn.Module):
    """Look at the frames around, then at the channels: (B, U, D), (B, U, 1) -> (B, U, D).

    Dropout applies to the hidden units: applied to x, it would raise the variance that the layer
    norms divide by, in training only. Source: Liu et al. 2022, as Vocos (arXiv 2306.00814) has it.
    """

    def __init__(self, d_model: int, d_ffn: int, *, scale: float, dropout: float) -> None:
        super().__init__()
        self.conv = FrameConv(d_model, d_model, 2 * REACH + 1, padding=REACH, groups=d_model)
        self.norm = nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ffn), nn.Linear(d_ffn, d_model)
        self.dropout = Dropout(dropout)
        self.scale = nn.Parameter(torch.full((d_model,), scale))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add to x; what is past the end of an utterance is not seen."""
        inner: Tensor = self.down(self.dropout(gelu(self.up(self.norm(self.conv(x * mask))))))
        return x + self.scale * inner


class ConvNeXt(nn.ModuleList):
    """Run several blocks, each of which begins with little to say."""

    def __init__(self, count: int, d_model: int, d_ffn: int, dropout: float = 0.0) -> None:
        options = {"scale": 1 / count, "dropout": dropout}
        super().__init__(ConvNeXtBlock(d_model, d_ffn, **options) for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run them: (B, U, D), (B, U, 1) -> (B, U, D)."""
        for block in self:
            x = block(x, mask)
        return x


class Encoder(nn.Module):
    """Encode features: (B, U, 2 M), (B, U, 1) -> (B, U, D)."""

    def __init__(self, *, n_mels: int, d_model: int, d_ffn: int, num_layers: int) -> None:
        super().__init__()
        self.normalize = GlobalNorm(n_mels=PER_CODE * n_mels)
        self.proj = nn.Linear(PER_CODE * n_mels, d_model)
        self.blocks, self.norm = ConvNeXt(num_layers, d_model, d_ffn), nn.LayerNorm(d_model)
        self.context = num_layers * REACH + 1  # frames of codes to each side

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Run the blocks."""
        states: Tensor = self.norm(self.blocks(self.proj(self.normalize(features)), mask))
        return states


class Decoder(nn.Module):
    """Make audio of states, by an inverse Fourier transform: (B, U, D), (B, U, 1) -> (B, S).

    Source: Siuzdak 2023 (Vocos, arXiv 2306.00814).
    """

    inverse: Tensor

    def __init__(
        self, *, hop: int, d_model: int, d_ffn: int, num_layers: int, num_fine_layers: int
    ) -> None:
        super().__init__()
        self.hop, window = hop, OVERLAP * hop
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn)
        self.upsample = nn.Linear(d_model, PER_CODE * d_model)
        self.fine_blocks = ConvNeXt(num_fine_layers, d_model, d_ffn)
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, window + 2)
        self.register_buffer("inverse", inverse_basis(window), persistent=False)
        fine = num_fine_layers * REACH + OVERLAP - 1  # hops: of blocks, and of windows
        self.context = num_layers * REACH + -(-fine // PER_CODE)  # frames of codes to each side

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Run the blocks, double the frames, and add up the windows of their spectra."""
        x = self.upsample(self.blocks(states, mask)).unflatten(2, (PER_CODE, -1)).flatten(1, 2)
        fine = mask.repeat_interleave(PER_CODE, 1)
        x = self.head(self.norm(self.fine_blocks(x, fine)))  # (B, T, 2 F)
        with torch.autocast(x.device.type, enabled=False):
            return self._sound(x.float(), fine.float())

    def _sound(self, spectra: Tensor, mask: Tensor) -> Tensor:
        """Invert logarithms of magnitudes and angles: (B, T, 2 F), (B, T, 1) -> (B, S)."""
        magnitudes, angles = spectra.chunk(2, 2)  # (B, T, F)
        magnitudes = magnitudes.clamp(max=LOUDEST).exp() * mask
        windows = torch.cat([magnitudes * angles.cos(), magnitudes * angles.sin()], 2)
        hops = (windows @ self.inverse).reshape(*windows.shape[:2], OVERLAP, self.hop)
        # Each window's hops, one hop further than those before: -> (B, T + 3, hop)
        shifted = [pad(hops[:, :, n], (0, 0, n, OVERLAP - 1 - n)) for n in range(OVERLAP)]
        side = (OVERLAP - 1) * self.hop // 2
        return torch.stack(shifted).sum(0).flatten(1)[:, side:-side]
