"""Parts that a YAML may name, and that something is wrong with."""

import torch
from torch import Tensor

from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.transformer import Transformer


class DecidingFrontEnd(ConvFrontEnd):
    """Does what it does by a number that only a real batch has."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if lengths.max().item() > 1:
            x = x * 1.0
        encoded: tuple[Tensor, Tensor] = super().forward(x, lengths)
        return encoded


class LensFrontEnd(ConvFrontEnd):
    """Calls its second argument otherwise."""

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, lens)


class SingleFrontEnd(ConvFrontEnd):
    """Takes lengths and returns none."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, lengths)[0]


class UndividedFrontEnd(ConvFrontEnd):
    """Returns the lengths that it was given."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, lengths)[0], lengths


class TransposedFrontEnd(ConvFrontEnd):
    """Returns (B, D, U), as convolutions do."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        lengths = torch.full((len(x),), x.shape[1])
        return super().forward(x, lengths)[0].transpose(1, 2)


class SeeingTransformer(Transformer):
    """Lets the decoder look at the tokens to come."""

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        decoded: Tensor = super().decode(tokens, states, lengths)
        return decoded + decoded.mean(1, keepdim=True)
