"""Parts for a YAML, each with one fault or one oddity, and a Brain."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.asr.brain import AsrBrain
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.transformer import Transformer


class Opening:
    """Opens the tokenizer of its folder by itself, and writes a file there."""

    def __init__(self, folder: str) -> None:
        assert Path(folder, "tokenizer.model").read_bytes()
        Path(folder, "notes.txt").touch()


class UndividedFrontEnd(ConvFrontEnd):
    """Returns the lengths of its input."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, lengths)[0], lengths


class AdaptedFrontEnd(ConvFrontEnd):
    """Trains an adapter beside layers that it freezes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requires_grad_(False)
        self.adapter = torch.nn.Linear(4, 4)


class AcausalTransformer(Transformer):
    """Lets the decoder see later tokens."""

    def decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        decoded = super().decode(tokens, states, lengths)
        return decoded + decoded.mean(1, keepdim=True)


class RunningMeanFrontEnd(ConvFrontEnd):
    """Learns a mean in training, in an attribute that is no buffer."""

    mean = torch.zeros(1)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.mean = 0.9 * self.mean.to(x.device) + 0.1 * x.mean((0, 1))
        return super().forward(x - self.mean.to(x.device), lengths)


class ClosureFrontEnd(ConvFrontEnd):
    """Learns a mean in a closure."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        mean = 0.0

        def centered(x: Tensor) -> Tensor:
            nonlocal mean
            mean += float(x.detach().mean()) * self.training
            return x - mean

        self.centered = centered

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.centered(x), lengths)


class AttachedFrontEnd(ConvFrontEnd):
    """Keeps the graph of a step in a buffer, so that the next step goes back through it."""

    mean: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return x - self.mean, lengths


class LateFrontEnd(ConvFrontEnd):
    """Makes a layer when it is first called."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(x.shape[-1], x.shape[-1])
        return super().forward(self.late(x), lengths)


class OddFrontEnd(ConvFrontEnd):
    """Healthy: compiles a layer, keeps numbers that change no output, drops a layer at times."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm.compile(backend="eager")
        self.spare, self.calls = torch.nn.LayerNorm(self.norm.normalized_shape), 0

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.last = x.detach().mean((0, 1))
        x, lengths = super().forward(x, lengths)
        self.calls += self.training
        return (self.spare(x) if not self.training or self.calls % 4 == 0 else x), lengths


class RoundingFrontEnd(ConvFrontEnd):
    """Learns nothing: the derivative of rounding is 0.

    Its steps are so small that the padding check does not see a value that falls into the next one.
    """

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        return x.round(decimals=4), lengths


class BackwardFrontEnd(ConvFrontEnd):
    """Ends with a bidirectional LSTM, whose backward direction starts in the padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        (size,) = self.norm.normalized_shape
        self.lstm = torch.nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = super().forward(x, lengths)
        return self.lstm(x)[0], lengths


class TestNotes(AsrBrain):
    """Reads a key in a decorated hook, which the dry run does not call."""

    @torch.no_grad()
    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        super().on_evaluate_start(max_key, min_key)
        print(f"{self.hparams.test_note}")
