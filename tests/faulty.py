"""Parts that fail in the ways that real ones do, for the tests that look for the failure."""

from typing import Any

import torch
from torch import Tensor, nn

from sbkit.nn.frontend import ConvFrontEnd

LOUD = 23.5  # mean log-mel energy of a frame: 21.3 at most in speech, 25.4 in noise at full scale


class Overflow(nn.Module):
    """Give infinity for utterances that are too loud, as an unguarded exponential would."""

    def forward(self, features: Tensor) -> Tensor:
        """Look at each utterance alone: (B, T, M) -> (B, T, M)."""
        loud = features.mean(2).amax(1).reshape(-1, 1, 1) > LOUD
        return torch.where(loud, features * torch.inf, features)


class FragileFrontEnd(ConvFrontEnd):
    """A front-end that cannot stand noise at full scale."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.overflow = Overflow()

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Overflow, or go on as usual."""
        return super().forward(self.overflow(features), lengths)
