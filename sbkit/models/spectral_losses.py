"""Distances between the spectra of two signals, and a discriminator of spectrograms.

Legend: B utterances, S samples, T frames of a transform, F frequencies.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.lengths import length_mask
from sbkit.models.vocoder import LogMel

WINDOW_SIZES = (256, 512, 1024)  # samples of each transform; its hop is a quarter of the window
MIN_MAGNITUDE = 1e-2  # under the logarithm
NEGATIVE_SLOPE = 0.1


def spectra(audio: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield magnitudes (B, F, T), mask (B, 1, T) and hop in samples of each transform of (B, S).

    The mask is true within an utterance. Magnitudes past the end are zero, so that an utterance has
    the same loss in every batch.
    """
    for size in WINDOW_SIZES:
        hop = size // 4
        window = torch.hann_window(size, device=audio.device)
        spectrum = torch.stft(
            audio, size, hop, window=window, pad_mode="constant", return_complex=True
        )
        magnitudes = (torch.view_as_real(spectrum).square().sum(-1) + 1e-8).sqrt()
        mask = length_mask(lengths // hop + 1, spectrum.shape[2], audio.device).unsqueeze(1)
        yield magnitudes * mask, mask, hop


def spectral_distance(actual: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    """Sum the distance between two signals' spectra over samples: 2 x (B, S), (B,) -> (B,).

    Each transform adds the difference of logarithms and the spectral convergence.
    Source: Yamamoto et al. 2020 (arXiv 1910.11480).
    """
    distance = actual.new_zeros(len(actual))
    pairs = zip(spectra(actual, lengths), spectra(target, lengths), strict=True)
    for (x, _, hop), (y, _, _) in pairs:
        difference = x.clamp(min=MIN_MAGNITUDE).log() - y.clamp(min=MIN_MAGNITUDE).log()
        logs = difference.abs().mean(1).sum(1)
        convergence = (x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1).clamp(min=1)
        distance = distance + (logs * hop + convergence * lengths) / len(WINDOW_SIZES)
    return distance


class SpectrogramDiscriminator(nn.Module):
    """Score the frames of spectra: 1 for recorded audio, 0 for decoded audio.

    Source: the multi-resolution discriminator of UnivNet (arXiv 2106.07889), reduced in size.
    """

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        widths = (1, channels, channels, channels, 1)
        self.reach = len(widths) - 1  # frames to each side
        self.stacks = nn.ModuleList()
        for _ in WINDOW_SIZES:
            layers = nn.Sequential()
            for inputs, outputs in pairwise(widths):
                activation = nn.LeakyReLU(NEGATIVE_SLOPE) if inputs > 1 else nn.Identity()
                conv = nn.Conv2d(inputs, outputs, (9, 3), (2, 1), (4, 0))
                layers.append(nn.Sequential(activation, conv))
            self.stacks.append(layers)

    def forward(self, audio: Tensor, lengths: Tensor, target: float) -> Tensor:
        """Return the mean squared error of the scores: (B, S), (B,) -> (B,)."""
        errors: list[Tensor] = []
        for stack, (magnitudes, mask, _) in zip(self.stacks, spectra(audio, lengths), strict=True):
            levels = (magnitudes.clamp(min=MIN_MAGNITUDE) / MIN_MAGNITUDE).log()  # 0 is silence
            scores = stack(pad(levels.unsqueeze(1), (self.reach, self.reach)))  # (B, 1, F', T)
            square = (scores - target).square().mean(2) * mask  # (B, 1, T)
            errors.append((square.sum(2) / mask.sum(2)).squeeze(1))
        return torch.stack(errors).mean(0)


def mel_distance(features: LogMel, actual: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    """Sum the mean difference of log-mel features over frames: 2 x (B, S), (B,) -> (B,)."""
    (x, _), (y, _) = features(actual, lengths), features(target, lengths)
    return (x - y).abs().mean(2).sum(1)
