"""Mean and variance of the features, measured once over the training set and kept in the model.

Legend: B utterances, T frames, M mel bins.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.distributed.device import widest_float


class GlobalNorm(nn.Module):
    """Normalize every mel bin to zero mean and unit variance: (..., M) -> (..., M)."""

    mean: Tensor
    std: Tensor
    frames: Tensor

    def __init__(self, *, n_mels: int = 80) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_mels))
        self.register_buffer("std", torch.ones(n_mels))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        """Normalize in the type of the statistics."""
        return (features.to(self.mean.dtype) - self.mean) / self.std

    def set_statistics(self, sums: "FeatureSums") -> None:
        """Set mean and standard deviation from sums over a whole training set."""
        mean, std = sums.mean_and_std()
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.frames.copy_(sums.frames)


class FeatureSums:
    """Add up features in float64, so that the order of a million utterances does not matter."""

    def __init__(self, *, n_mels: int, device: torch.device) -> None:
        self.frames = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros(2, n_mels, dtype=widest_float(device), device=device)

    def add(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add batches of features (B, T, M), zero past their lengths, and lengths (B,)."""
        for features, lengths in batches:
            wide = features.to(self.total.dtype).flatten(0, 1)  # (B*T, M)
            self.total += torch.stack([wide.sum(0), wide.square().sum(0)])
            self.frames += lengths.sum()

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Divide once: (M,), (M,); a bin that never varies keeps a deviation of one.

        Raises SbkitError when nothing was added.
        """
        if int(self.frames) == 0:
            raise SbkitError(
                "The training set must hold at least one frame of audio (25 ms) to measure the "
                "features' mean, but holds none. Check --data_folder and min_seconds."
            )
        mean = self.total[0] / self.frames
        variance = (self.total[1] / self.frames - mean.square()).clamp(min=0)
        std = variance.sqrt()
        return mean, torch.where(std > 1e-5, std, torch.ones_like(std))
