"""Linear layers between an encoder and a head, as recipes that fine-tune one add them."""

from typing import ClassVar

from torch import nn

from sbkit.config.ranges import AT_LEAST_NONE, AT_LEAST_ONE, SHARE
from sbkit.models.dropout import Dropout


class LinearStack(nn.Sequential):
    """Linear, LayerNorm, LeakyReLU and dropout, ``layers`` times: (B, U, D) -> (B, U, D).

    SpeechBrain's has batch norms, whose statistics take padding along.
    """

    RANGES: ClassVar = {"size": AT_LEAST_ONE, "layers": AT_LEAST_NONE, "dropout": SHARE}

    def __init__(self, *, size: int, layers: int, dropout: float = 0.0) -> None:
        blocks = (
            (nn.Linear(size, size), nn.LayerNorm(size), nn.LeakyReLU(), Dropout(dropout))
            for _ in range(layers)
        )
        super().__init__(*(each for block in blocks for each in block))
