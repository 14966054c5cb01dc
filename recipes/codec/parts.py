"""The parts of a codec, in the order that sound travels.

Legend: B utterances, S samples, T frames of a hop, U frames of codes (two hops), F frequencies,
M mel bins, D model width, G codebooks, L levels of each.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torchaudio.functional import melscale_fbanks

from recipes.codec.space import CodeSpace
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import Range
from sbkit.models.dropout import Dropout
from sbkit.models.frame_conv import FrameConv
from sbkit.models.normalize import GlobalNorm

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


class FiniteScalarQuantizer(nn.Module):
    """Round each of a few channels to its levels; a code is one combination of them.

    There is no table: a code is a number whose digits are the levels.
    Source: Mentzer et al. 2023 (arXiv 2309.15505).
    """

    counts: Tensor
    basis: Tensor

    def __init__(self, *, d_model: int, groups: int, levels: Sequence[int]) -> None:
        super().__init__()
        self.space = space = CodeSpace(groups, tuple(levels))
        self.to_levels = nn.Linear(d_model, groups * len(levels))
        self.from_levels = nn.Linear(groups * len(levels), d_model)
        counts = torch.tensor(space.levels)
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("basis", counts.cumprod(0) // counts, persistent=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Round states, with the gradient of what is rounded: (B, U, D) -> same, (B, U, G)."""
        x = self.to_levels(states).float().unflatten(2, (self.space.groups, -1))  # (B, U, G, L)
        half, offset = (self.counts - 1) / 2, (1 - self.counts % 2) / 2
        width = half * 1.001  # else the outermost levels are never reached
        bounded = (x + (offset / width).atanh()).tanh() * width - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = (rounded.detach() + half + offset).round().long()
        return self._states(rounded + offset), (digits * self.basis).sum(3)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the states of codes that were checked: (B, U, G) -> (B, U, D)."""
        digits = codes.unsqueeze(3) // self.basis % self.counts  # (B, U, G, L)
        return self._states(digits - (self.counts - 1) / 2)

    def _states(self, levels: Tensor) -> Tensor:
        states: Tensor = self.from_levels((levels * 2 / (self.counts - 1)).flatten(2))
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


class CodecModel:
    """Call the parts in their order."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: LogMel,
        encoder: Encoder,
        quantizer: FiniteScalarQuantizer,
        decoder: Decoder,
    ) -> None:
        self.model, self.features = model, compute_features
        self.encoder, self.quantizer, self.decoder = encoder, quantizer, decoder

    @property
    def settings(self) -> dict[str, object]:
        """Return the sizes that whoever runs the graphs needs."""
        space = self.quantizer.space
        return {
            "groups": space.groups,
            "levels": space.levels,
            "frame": self.features.frame,
            "encoder_context": self.encoder.context,
            "decoder_context": self.decoder.context,
        }

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Code audio between -1 and 1, and decode it: (B, S), (B,) -> (B, S), (B, U, G), (B,)."""
        states, codes, frames, mask = self._quantized(audio, lengths)
        return self.decoder(states, mask)[:, : audio.shape[1]], codes, frames

    def encode(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Code audio between -1 and 1: (B, S), (B,) -> (B, U, G), (B,); zero past the lengths."""
        _, codes, frames, mask = self._quantized(audio, lengths)
        return codes * mask.long(), frames

    def decode(self, codes: Tensor) -> tuple[Tensor]:
        """Decode codes that were checked: (B, U, G) -> (B, S)."""
        mask = torch.ones_like(codes[:, :, :1], dtype=torch.float32)
        return (self.decoder(self.quantizer.decode(codes), mask),)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Code audio of the scale of int16, and decode it: (B, S), (B,) -> (B, S)."""
        return self.forward(audio / FULL_SCALE, audio_lengths)[0]

    def _quantized(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(audio.device.type, enabled=False):
            features, frames = self.features(audio.float(), lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2).float()
        states, codes = self.quantizer(self.encoder(features, mask))
        return states, codes, frames, mask
