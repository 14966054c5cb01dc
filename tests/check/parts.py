"""Parts that a YAML may name, and that something is wrong with."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.transformer import Transformer


class LensFrontEnd(ConvFrontEnd):
    """Calls its second argument otherwise."""

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, lens)


class UndividedFrontEnd(ConvFrontEnd):
    """Returns the lengths that it was given."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, lengths)[0], lengths


class SeeingTransformer(Transformer):
    """Lets the decoder look at the tokens to come."""

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        decoded: Tensor = super().decode(tokens, states, lengths)
        return decoded + decoded.mean(1, keepdim=True)


class RunningMeanFrontEnd(ConvFrontEnd):
    """Learns a mean in training, and has it in an attribute that is no buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.calls = torch.zeros(1), 0

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.mean = 0.9 * self.mean.to(x.device) + 0.1 * x.mean((0, 1))
        centred: tuple[Tensor, Tensor] = super().forward(x - self.mean.to(x.device), lengths)
        return centred


class ClosingFrontEnd(ConvFrontEnd):
    """Learns a mean, and has it in a closure."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        moving = 0.0

        def centred(x: Tensor) -> Tensor:
            nonlocal moving
            moving += float(x.detach().mean()) * self.training
            return x - moving

        self.centred = centred

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        centred: tuple[Tensor, Tensor] = super().forward(self.centred(x), lengths)
        return centred


class AttachedFrontEnd(ConvFrontEnd):
    """Has the graph of the step before in a buffer, which the next one follows."""

    mean: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return x - self.mean, lengths


class CompiledFrontEnd(ConvFrontEnd):
    """Compiles a layer by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm.compile(backend="eager")


class CountingFrontEnd(ConvFrontEnd):
    """Keeps a number and a tensor on which nothing depends that is computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls, self.last = 0, torch.zeros(0)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.last = x.detach().mean((0, 1))
        counted: tuple[Tensor, Tensor] = super().forward(x, lengths)
        return counted


class LateFrontEnd(ConvFrontEnd):
    """Makes a layer when it is first called."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(x.shape[-1], x.shape[-1])
        made: tuple[Tensor, Tensor] = super().forward(self.late(x), lengths)
        return made


class CachingFrontEnd(ConvFrontEnd):
    """Keeps a layer where no walk over objects comes to it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layer_of = lru_cache(lambda size: torch.nn.Linear(size, size))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = super().forward(self.layer_of(x.shape[-1])(x), lengths)
        return made


class DroppingFrontEnd(ConvFrontEnd):
    """Drops a layer in three of four steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spare, self.calls = torch.nn.LayerNorm(self.norm.normalized_shape), 0

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        self.calls += self.training
        return (self.spare(x) if not self.training or self.calls % 4 == 0 else x), lengths


class CenteringFrontEnd(ConvFrontEnd):
    """Takes the mean of all frames away, padding among them."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        return x - x.mean(1, keepdim=True), lengths


class BackwardFrontEnd(ConvFrontEnd):
    """Ends with an LSTM in both directions, of which one begins in the padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        (size,) = self.norm.normalized_shape
        self.lstm = torch.nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        return self.lstm(x)[0], lengths
