"""Parts that a YAML may name, and that something is wrong with."""

from torch import Tensor

from sbkit.models.frontend import ConvFrontEnd


class DecidingFrontEnd(ConvFrontEnd):
    """Does what it does by a number that only a real batch has."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if lengths.max().item() > 1:
            x = x * 1.0
        encoded: tuple[Tensor, Tensor] = super().forward(x, lengths)
        return encoded
