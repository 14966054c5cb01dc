"""Pool the frames of an utterance into one vector.

Legend: B utterances, U frames, D model width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import length_mask
from sbkit.config.ranges import AT_LEAST_ONE

EPSILON = 1e-5  # least variance; the gradient of a square root has no bound at zero


class AttentiveStatisticsPooling(nn.Module):
    """Weigh frames by attention, and join their mean and deviation: (B, U, D), (B,) -> (B, 2D).

    In float32; frames past the end of an utterance weigh nothing, so padding changes nothing. An
    utterance without a frame becomes zeros. Source: Okabe et al. 2018, equations 2 to 7.
    """

    RANGES: ClassVar = dict.fromkeys(("d_model", "attention_dim"), AT_LEAST_ONE)

    def __init__(self, *, d_model: int, attention_dim: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Linear(d_model, attention_dim), nn.Tanh(), nn.Linear(attention_dim, 1)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool: (B, U, D), (B,) -> (B, 2D)."""
        mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)  # (B, U, 1), true within
        scores = self.attention(x).float().masked_fill(~mask, -torch.inf)
        weights = scores.softmax(1).masked_fill(~mask, 0.0)  # of no frame at all: 0, not 0 / 0
        x = x.float().masked_fill(~mask, 0.0)
        mean = (weights * x).sum(1)
        variance = (weights * (x - mean.unsqueeze(1)).square()).sum(1)
        spoken = mask.any(1)  # (B, 1)
        return torch.cat([mean, variance.clamp(min=EPSILON).sqrt() * spoken], dim=-1)
