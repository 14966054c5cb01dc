"""How far audio is from audio, and a network that tells one from the other.

Legend: B utterances, S samples, T frames of a transform, F frequencies.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from recipes.codec.parts import LogMel
from sbkit.audio.lengths import length_mask

SIZES = (256, 512, 1024)  # samples of the transforms, each every quarter of it
FLOOR = 1e-2  # under the logarithm of magnitudes
SLOPE = 0.1  # of what is negative


def spectra(audio: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the magnitudes of several transforms, and the samples of a frame: (B, S) -> (B, F, T).

    Samples past the end are zeros, as padding is: an utterance is the same in every batch.
    """
    for size in SIZES:
        window = torch.hann_window(size, device=audio.device)
        found = torch.stft(
            audio, size, size // 4, window=window, pad_mode="constant", return_complex=True
        )
        yield (torch.view_as_real(found).square().sum(-1) + 1e-8).sqrt(), size // 4


def spectral_distance(found: Tensor, expected: Tensor, lengths: Tensor) -> Tensor:
    """Sum over samples how far spectra are apart: 2 x (B, S), (B,) -> (B,).

    Of each transform the difference of the logarithms and the spectral convergence.
    Source: Yamamoto et al. 2020 (arXiv 1910.11480).
    """
    total = found.new_zeros(len(found))
    for (one, hop), (two, _) in zip(spectra(found), spectra(expected), strict=True):
        logs = (one.clamp(min=FLOOR).log() - two.clamp(min=FLOOR).log()).abs().mean(1).sum(1)
        convergence = (one - two).flatten(1).norm(dim=1) / two.flatten(1).norm(dim=1).clamp(min=1)
        total = total + (logs * hop + convergence * lengths) / len(SIZES)
    return total


class SpectrogramDiscriminator(nn.Module):
    """Score the frames of spectra: 1 for what was recorded, 0 for what was decoded.

    Source: the multi-resolution discriminator of UnivNet (arXiv 2106.07889), small.
    """

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        widths = (1, channels, channels, channels, 1)
        self.stacks = nn.ModuleList(
            nn.Sequential(*(_layer(*each) for each in pairwise(widths))) for _ in SIZES
        )

    def forward(self, audio: Tensor, lengths: Tensor, target: float) -> Tensor:
        """Return the mean squared error of the scores: (B, S), (B,) -> (B,)."""
        errors = []
        for stack, (magnitudes, hop) in zip(self.stacks, spectra(audio), strict=True):
            scores = stack(magnitudes.clamp(min=FLOOR).log().unsqueeze(1))  # (B, 1, F', T)
            mask = length_mask(lengths // hop + 1, scores.shape[3], audio.device)
            square = (scores - target).square().mean((1, 2)) * mask  # (B, T)
            errors.append(square.sum(1) / mask.sum(1))
        return torch.stack(errors).mean(0)


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    before = nn.LeakyReLU(SLOPE) if inputs > 1 else nn.Identity()
    return nn.Sequential(before, nn.Conv2d(inputs, outputs, (9, 3), (2, 1), (4, 1)))


def mel_distance(features: LogMel, found: Tensor, expected: Tensor, lengths: Tensor) -> Tensor:
    """Sum over frames the mean difference of log-mel features: 2 x (B, S), (B,) -> (B,)."""
    (one, _), (two, _) = features(found, lengths), features(expected, lengths)
    distance: Tensor = (one - two).abs().mean(2).sum(1)
    return distance
