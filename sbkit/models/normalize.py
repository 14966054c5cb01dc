"""Mean and variance of the features, measured once over the training set and kept in the model.

Legend: B utterances, T frames, M mel bins.
"""

import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError


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

    def set_statistics(self, sums: Tensor, frames: Tensor) -> None:
        """Set mean and deviation from sums (2, M), of features and of squares, over frames ().

        A bin that never varies keeps a deviation of one. Raises SbkitError where no frame is.
        """
        if int(frames) == 0:
            raise SbkitError(
                "The training set must hold at least one frame of audio (25 ms) to measure the "
                "features' mean, but holds none. Check --data_folder and min_seconds."
            )
        mean, mean_square = sums / frames
        std = (mean_square - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-5, std, torch.ones_like(std)))
        self.frames.copy_(frames)
