"""The parts of a codec, in the order that sound travels.

Legend: B utterances, S samples, T frames of a hop, U frames of codes (two hops), F frequencies,
M mel bins, D model width, G codebooks, L levels of each.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torchaudio.functional import melscale_fbanks

from recipes.codec.space import CodeSpace
from sbkit.audio.lengths import length_mask
from sbkit.base.errors import SbkitError
from sbkit.config.ranges import Range
from sbkit.models.frame_conv import FrameConv
from sbkit.models.normalize import GlobalNorm

OVERLAP = 4  # windows over each sample
PER_CODE = 2  # hops of a frame of codes
EDGE = 3  # half hops of a window beside the hop that it stands for
FLOOR = 1e-5  # under the logarithm, of audio between -1 and 1
LOUDEST = 6.0  # logarithm of a magnitude
KERNEL = 7  # frames that a block sees


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # else training could not use what a bundle has cached
def fourier_basis(window: int, device: torch.device) -> Tensor:
    """Return what a Hann window of samples is multiplied by for its spectrum: (window, 2 F)."""
    at = torch.arange(window, dtype=torch.float64)
    angles = at.unsqueeze(1) * torch.arange(window // 2 + 1) * (2 * torch.pi / window)
    hann = torch.hann_window(window, dtype=torch.float64).unsqueeze(1)
    basis = torch.cat([angles.cos(), -angles.sin()], 1) * hann
    return basis.float().to(device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def inverse_basis(window: int, device: torch.device) -> Tensor:
    """Return what makes windows of spectra, which add up to the signal: (2 F, window)."""
    twice = torch.full((window // 2 + 1,), 2.0)
    twice[0] = twice[-1] = 1.0
    scale = twice.repeat(2).unsqueeze(1) / (window * OVERLAP * 3 / 8)  # the squares of Hann
    return scale.to(device) * fourier_basis(window, device).T


class LogMel(nn.Module):
    """Compute log-mel features, two hops side by side: (B, S), (B,) -> (B, U, 2 M), (B,).

    Windows are centred on their hop; U is the samples divided by those of a frame, rounded up.
    """

    audio_scale = 1.0
    RANGES: ClassVar = {"hop": Range(low=2, whole=True, advice="200 is 12.5 ms at 16 kHz.")}

    def __init__(self, *, n_mels: int, hop: int, sample_rate: int) -> None:
        super().__init__()
        self.n_mels, self.hop, self.sample_rate = n_mels, hop, sample_rate
        self.frame = PER_CODE * hop  # samples

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames of codes: (B,) samples -> (B,)."""
        return (lengths + self.frame - 1) // self.frame

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them as products of matrices, which every runtime has."""
        hop, window, side = self.hop, OVERLAP * self.hop, EDGE * self.hop // 2
        frames = PER_CODE * ((audio.shape[1] + self.frame - 1) // self.frame)  # T
        padded = pad(audio, (side, side + self.frame))[:, : (frames + OVERLAP - 1) * hop]
        hops = padded.reshape(audio.shape[0], -1, hop)
        windows = torch.cat([hops[:, each : each + frames] for each in range(OVERLAP)], 2)
        real, imaginary = (windows @ fourier_basis(window, audio.device)).chunk(2, 2)  # (B, T, F)
        magnitudes = (real.square() + imaginary.square() + FLOOR**2).sqrt()
        filters = mel_filters(window // 2 + 1, self.n_mels, self.sample_rate, audio.device)
        features = (magnitudes @ filters).clamp(min=FLOOR).log()  # (B, T, M)
        pairs = features.reshape(audio.shape[0], -1, PER_CODE * self.n_mels)
        return pairs, self.frame_lengths(lengths)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def mel_filters(frequencies: int, n_mels: int, sample_rate: int, device: torch.device) -> Tensor:
    """Return triangles on the mel scale, from 20 Hz to half the sample rate: (F, M)."""
    filters: Tensor = melscale_fbanks(frequencies, 20.0, sample_rate / 2, n_mels, sample_rate)
    return filters.to(device)


class ConvNeXtBlock(nn.Module):
    """Look at the frames around, then at the channels: (B, U, D), (B, U, 1) -> (B, U, D).

    Source: Liu et al. 2022, as Vocos (arXiv 2306.00814) has it for sound.
    """

    def __init__(self, d_model: int, d_ffn: int, *, scale: float) -> None:
        super().__init__()
        self.conv = FrameConv(d_model, d_model, KERNEL, padding=KERNEL // 2, groups=d_model)
        self.norm = nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ffn), nn.Linear(d_ffn, d_model)
        self.scale = nn.Parameter(torch.full((d_model,), scale))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add to x; what is past the end of an utterance is not seen."""
        inner: Tensor = self.down(gelu(self.up(self.norm(self.conv(x * mask)))))
        return x + self.scale * inner


def blocks(count: int, d_model: int, d_ffn: int) -> nn.ModuleList:
    """Make several blocks, each of which begins with little to say."""
    return nn.ModuleList(ConvNeXtBlock(d_model, d_ffn, scale=1 / count) for _ in range(count))


class Encoder(nn.Module):
    """Encode features: (B, U, 2 M), (B, U, 1) -> (B, U, D)."""

    def __init__(self, *, n_mels: int, d_model: int, d_ffn: int, num_layers: int) -> None:
        super().__init__()
        self.normalize = GlobalNorm(n_mels=PER_CODE * n_mels)
        self.proj = nn.Linear(PER_CODE * n_mels, d_model)
        self.blocks, self.norm = blocks(num_layers, d_model, d_ffn), nn.LayerNorm(d_model)
        self.context = num_layers * (KERNEL // 2) + 1  # frames of codes to each side

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Run the blocks."""
        x = self.proj(self.normalize(features))
        for block in self.blocks:
            x = block(x, mask)
        states: Tensor = self.norm(x)
        return states


class FiniteScalarQuantizer(nn.Module):
    """Round each of a few channels to its levels; a code is one combination of them.

    There is no table: a code is a number whose digits are the levels.
    Source: Mentzer et al. 2023 (arXiv 2309.15505).
    """

    basis: Tensor
    halves: Tensor
    offsets: Tensor

    def __init__(self, *, d_model: int, groups: int, levels: Sequence[int]) -> None:
        super().__init__()
        self.space = space = CodeSpace(groups, tuple(levels))
        self.to_levels = nn.Linear(d_model, space.channels)
        self.from_levels = nn.Linear(space.channels, d_model)
        counts = torch.tensor(levels)
        below = torch.cat([torch.ones(1, dtype=torch.int64), counts.cumprod(0)[:-1]])
        for name, value in (
            ("basis", below),
            ("halves", (counts - 1) / 2),
            ("offsets", torch.where(counts % 2 == 0, 0.5, 0.0)),
        ):
            self.register_buffer(name, value, persistent=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Round states, with the gradient of what is rounded: (B, U, D) -> same, (B, U, G)."""
        x = self.to_levels(states).float().unflatten(2, (self.space.groups, -1))  # (B, U, G, L)
        widths = self.halves * 1.001  # else the outermost levels are never reached
        bounded = (x + (self.offsets / widths).atanh()).tanh() * widths - self.offsets
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = (rounded.detach() + self.halves + self.offsets).round().long()
        return self._states(rounded + self.offsets), (digits * self.basis).sum(3)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the states of codes that were checked: (B, U, G) -> (B, U, D)."""
        counts = (2 * self.halves + 1).long()
        digits = codes.unsqueeze(3) // self.basis % counts  # (B, U, G, L)
        return self._states(digits - self.halves)

    def _states(self, levels: Tensor) -> Tensor:
        states: Tensor = self.from_levels((levels / self.halves).flatten(2))
        return states


class Decoder(nn.Module):
    """Make audio of states, by an inverse Fourier transform: (B, U, D), (B, U, 1) -> (B, S).

    Source: Siuzdak 2023 (Vocos, arXiv 2306.00814).
    """

    def __init__(
        self, *, hop: int, d_model: int, d_ffn: int, num_layers: int, num_fine_layers: int
    ) -> None:
        super().__init__()
        self.hop, self.window = hop, OVERLAP * hop
        self.blocks = blocks(num_layers, d_model, d_ffn)
        self.upsample = nn.Linear(d_model, PER_CODE * d_model)
        self.fine_blocks = blocks(num_fine_layers, d_model, d_ffn)
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, self.window + 2)
        # The fine blocks and three windows are in hops.
        fine = (num_fine_layers * (KERNEL // 2) + OVERLAP - 1 + PER_CODE - 1) // PER_CODE
        self.context = num_layers * (KERNEL // 2) + fine  # frames of codes to each side

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Run the blocks, double the frames, and add up the windows of their spectra."""
        x = states
        for block in self.blocks:
            x = block(x, mask)
        x = self.upsample(x).reshape(x.shape[0], -1, x.shape[2])  # (B, T, D)
        fine = mask.repeat_interleave(PER_CODE, 1)
        for block in self.fine_blocks:
            x = block(x, fine)
        with torch.autocast(x.device.type, enabled=False):
            return self._sound(self.head(self.norm(x)).float(), fine.float())

    def _sound(self, spectra: Tensor, mask: Tensor) -> Tensor:
        """Invert logarithms of magnitudes and angles: (B, T, 2 F), (B, T, 1) -> (B, S)."""
        magnitudes, angles = spectra.chunk(2, 2)  # (B, T, F)
        magnitudes = magnitudes.clamp(max=LOUDEST).exp() * mask
        parts = torch.cat([magnitudes * angles.cos(), magnitudes * angles.sin()], 2)
        windows = parts @ inverse_basis(self.window, parts.device)
        hops = windows.reshape(*windows.shape[:2], OVERLAP, -1)
        # Each window's hops, one hop further than those before: -> (B, T + 3, hop)
        shifted = [pad(hops[:, :, n], (0, 0, n, OVERLAP - 1 - n)) for n in range(OVERLAP)]
        side = EDGE * self.hop // 2
        return torch.stack(shifted).sum(0).flatten(1)[:, side:-side]


class CodecModel:
    """Call the parts in their order.

    Raises SbkitError where encoder and decoder do not have one length of a frame.
    """

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: LogMel,
        encoder: Encoder,
        quantizer: FiniteScalarQuantizer,
        decoder: Decoder,
        discriminator: nn.Module | None = None,
    ) -> None:
        if compute_features.hop != decoder.hop:
            raise SbkitError(
                f"`decoder` must have the hop of `compute_features` ({compute_features.hop}), but "
                f"has {decoder.hop}. Let both refer to one knob."
            )
        self.model, self.features = model, compute_features
        self.encoder, self.quantizer, self.decoder = encoder, quantizer, decoder
        self.discriminator = discriminator  # of training alone

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
        states, codes, mask, frames = self._quantized(audio, lengths)
        return self.decoder(states, mask)[:, : audio.shape[1]], codes, frames

    def encode(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Code audio between -1 and 1: (B, S), (B,) -> (B, U, G), (B,); zero past the lengths."""
        _, codes, mask, frames = self._quantized(audio, lengths)
        return codes * mask.long(), frames

    def decode(self, codes: Tensor) -> tuple[Tensor]:
        """Decode codes that were checked: (B, U, G) -> (B, S)."""
        mask = torch.ones_like(codes[:, :, :1], dtype=torch.float32)
        return (self.decoder(self.quantizer.decode(codes), mask),)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Code audio of the scale of int16, and decode it: (B, S), (B,) -> (B, S)."""
        return self.forward(audio / 2**15, audio_lengths)[0]

    def _quantized(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(audio.device.type, enabled=False):
            features, frames = self.features(audio.float(), lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2).float()
        states, codes = self.quantizer(self.encoder(features * mask, mask))
        return states, codes, mask, frames
