"""How far audio is from audio, and a network that tells one from the other.

Legend: B utterances, S samples, T frames of a transform, F frequencies.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.lengths import length_mask
from sbkit.models.vocoder import LogMel

SIZES = (256, 512, 1024)  # samples of the transforms, each every quarter of it
FLOOR = 1e-2  # under the logarithm of magnitudes
SLOPE = 0.1  # of what is negative


def spectra(audio: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the magnitudes of several transforms: (B, S), (B,) -> (B, F, T), (B, 1, T), samples.

    Beside them which frames are of the utterance (past those they are zero, so that it is the same
    in every batch), and how many samples apart these are.
    """
    for size in SIZES:
        hop, window = size // 4, torch.hann_window(size, device=audio.device)
        found = torch.stft(
            audio, size, hop, window=window, pad_mode="constant", return_complex=True
        )
        magnitudes = (torch.view_as_real(found).square().sum(-1) + 1e-8).sqrt()
        mask = length_mask(lengths // hop + 1, found.shape[2], audio.device).unsqueeze(1)
        yield magnitudes * mask, mask, hop


def spectral_distance(found: Tensor, expected: Tensor, lengths: Tensor) -> Tensor:
    """Sum over samples how far spectra are apart: 2 x (B, S), (B,) -> (B,).

    Of each transform the difference of the logarithms and the spectral convergence.
    Source: Yamamoto et al. 2020 (arXiv 1910.11480).
    """
    total, pairs = (
        found.new_zeros(len(found)),
        (spectra(each, lengths) for each in (found, expected)),
    )
    for (one, _, hop), (two, _, _) in zip(*pairs, strict=True):
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
        self.reach = len(widths) - 1  # frames to each side
        self.stacks = nn.ModuleList(
            nn.Sequential(*(_layer(*each) for each in pairwise(widths))) for _ in SIZES
        )

    def forward(self, audio: Tensor, lengths: Tensor, target: float) -> Tensor:
        """Return the mean squared error of the scores: (B, S), (B,) -> (B,)."""
        errors = []
        for stack, (magnitudes, mask, _) in zip(self.stacks, spectra(audio, lengths), strict=True):
            levels = (magnitudes.clamp(min=FLOOR) / FLOOR).log().unsqueeze(1)  # 0 is silence
            scores = stack(pad(levels, (self.reach, self.reach)))  # (B, 1, F', T)
            square = (scores - target).square().mean(2) * mask  # (B, 1, T)
            errors.append((square.sum(2) / mask.sum(2)).squeeze(1))
        return torch.stack(errors).mean(0)


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    before = nn.LeakyReLU(SLOPE) if inputs > 1 else nn.Identity()
    return nn.Sequential(before, nn.Conv2d(inputs, outputs, (9, 3), (2, 1), (4, 0)))


def mel_distance(features: LogMel, found: Tensor, expected: Tensor, lengths: Tensor) -> Tensor:
    """Sum over frames the mean difference of log-mel features: 2 x (B, S), (B,) -> (B,)."""
    (one, _), (two, _) = features(found, lengths), features(expected, lengths)
    distance: Tensor = (one - two).abs().mean(2).sum(1)
    return distance
