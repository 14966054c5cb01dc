"""Distances between the spectra of two signals, and a discriminator of spectrograms.

Legend: B utterances, S samples, T frames of a transform, F frequencies. Audio (B, S) must be zero
past the length of each utterance.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.lengths import length_mask
from sbkit.base.ranges import PositiveCount
from sbkit.models.vocoder import LogMel

WINDOW_SIZES = (256, 512, 1024)  # samples of each transform; its hop is a quarter of the window
MIN_MAGNITUDE = 1e-2  # under the logarithm
NEGATIVE_SLOPE = 0.1


def stft_magnitudes(audio: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield for each window the magnitudes of audio, (B, S) -> (B, F, T), a mask and the hop.

    Magnitudes past the end of an utterance are zero, so that its loss is the same in every batch.
    The mask (B, 1, T) is true within an utterance. The hop is in samples.
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
    """Return the distance between the spectra of two signals: (B, S), (B, S), (B,) -> (B,).

    The distance is a sum over samples. In each transform it is the log distance (the mean absolute
    difference of the log magnitudes) plus the spectral convergence; the transforms are averaged.
    Source: Yamamoto et al. 2020 (arXiv 1910.11480).
    """
    distance = actual.new_zeros(len(actual))
    actual_transforms = stft_magnitudes(actual, lengths)
    target_transforms = stft_magnitudes(target, lengths)
    for (x, _, hop), (y, _, _) in zip(actual_transforms, target_transforms, strict=True):
        difference = x.clamp(min=MIN_MAGNITUDE).log() - y.clamp(min=MIN_MAGNITUDE).log()
        log_distance = difference.abs().mean(1).sum(1)
        convergence = (x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1).clamp(min=1)
        transform_distance = log_distance * hop + convergence * lengths
        distance = distance + transform_distance / len(WINDOW_SIZES)
    return distance


class SpectrogramDiscriminator(nn.Module):
    """Rate each frame of a spectrogram: 1 for recorded audio, 0 for decoded audio.

    Source: the multi-resolution discriminator of UnivNet (arXiv 2106.07889), reduced in size.
    """

    def __init__(self, *, channels: PositiveCount) -> None:
        super().__init__()
        widths = (1, channels, channels, channels, 1)
        self.context_frames = len(widths) - 1  # to each side of a rated frame, one per layer
        self.stacks = nn.ModuleList()
        for _ in WINDOW_SIZES:
            stack = nn.Sequential()
            for index, (inputs, outputs) in enumerate(pairwise(widths)):
                is_first = index == 0
                activation = nn.Identity() if is_first else nn.LeakyReLU(NEGATIVE_SLOPE)
                conv = nn.Conv2d(inputs, outputs, kernel_size=(9, 3), stride=(2, 1), padding=(4, 0))
                stack.append(nn.Sequential(activation, conv))
            self.stacks.append(stack)

    def forward(self, audio: Tensor, lengths: Tensor, target_rating: float) -> Tensor:
        """Return the mean squared difference from the target rating: (B, S), (B,) -> (B,)."""
        errors: list[Tensor] = []
        transforms = stft_magnitudes(audio, lengths)
        for stack, (magnitudes, mask, _) in zip(self.stacks, transforms, strict=True):
            levels = (magnitudes.clamp(min=MIN_MAGNITUDE) / MIN_MAGNITUDE).log()  # 0 is silence
            context = (self.context_frames, self.context_frames)
            ratings = stack(pad(levels.unsqueeze(1), context))  # (B, 1, F', T)
            square = (ratings - target_rating).square().mean(2) * mask  # (B, 1, T)
            errors.append((square.sum(2) / mask.sum(2)).squeeze(1))
        return torch.stack(errors).mean(0)


def mel_distance(log_mel: LogMel, actual: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    """Sum the mean difference of log-mel features over frames: (B, S), (B, S), (B,) -> (B,)."""
    x, _ = log_mel(actual, lengths)
    y, _ = log_mel(target, lengths)
    return (x - y).abs().mean(2).sum(1)
