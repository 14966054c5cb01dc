"""A user's front-end, encoder of audio, augmentations, optimizer and learning rate schedule.

The layers of the front-end round down.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from sbkit.audio.lengths import Subsampling


class FrontEnd(nn.Module):
    subsampling = Subsampling(stride=4, offset=-3)

    def __init__(self, n_mels: int, d_model: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(n_mels, d_model, 3, 2), nn.ReLU(), nn.Conv1d(d_model, d_model, 3, 2)
        )

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(features.transpose(1, 2) / 10).transpose(1, 2)
        return x, self.subsampling.count(lengths)


class Waveforms(nn.Module):
    """Two strided convolutions over audio, which run without autocast."""

    subsampling = Subsampling(stride=640, offset=639)

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, d_model, 400, 160)
        self.conv2 = nn.Conv1d(d_model, d_model, 4, 4)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        padded = pad(audio / 32768, (0, 880)).unsqueeze(1)
        with torch.autocast(audio.device.type, enabled=False):
            x = self.conv2(silu(self.conv1(padded))).transpose(1, 2)
            return self.norm(x), self.subsampling.count(lengths)


class Volume(nn.Module):
    """A `wave_augment`."""

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return audio * (0.5 + torch.rand(len(audio), 1, device=audio.device)), lengths


class MaskStart(nn.Module):
    """A `spec_augment`."""

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(features[:, :2]), features[:, 2:]], dim=1)


class SignDescent(torch.optim.Optimizer):
    """An `opt_class`."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def falling(progress: float) -> float:
    """An `lr_schedule`."""
    return 1.0 - progress
