"""The encoder of Whisper, with the tensor names of its files, for clips at their own length.

Legend: B utterances, T frames of 10 ms, U frames of 20 ms, M mel bins, D width.

Source: Radford et al. 2022. Whisper pads every clip to 30 s. Here a clip keeps its length, and its
padding in a batch is masked from the first convolution on: a training step on clips of 5 s takes
about an eighth of the time. A clip that is padded to 30 s by zeros has the states that Whisper
gives it.
"""

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.models.layers import Dropout, FrameConv
from sbkit.models.pretrained.blocks import ACTIVATIONS, Attention, Config, layer_norm
from sbkit.models.pretrained.conformer import SINUSOID_BASE

KERNEL, STRIDE = 3, 2  # of the second convolution


class WhisperConvs(nn.Module):
    """Convolve twice, and halve the frames: (B, T, M), (B,) -> (B, U, D), (B,)."""

    subsampling = Subsampling(STRIDE, 2 - KERNEL + STRIDE)

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.conv1 = FrameConv(config["num_mel_bins"], width, KERNEL, padding=1)
        self.conv2 = FrameConv(width, width, KERNEL, STRIDE, padding=1)
        self.activation = ACTIVATIONS[config["hidden_act"]]

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = length_mask(lengths, features.shape[1], features.device).unsqueeze(-1)
        x = self.activation(self.conv1(features)) * mask
        return self.activation(self.conv2(x)), self.subsampling.count(lengths)


class WhisperBody(nn.Module):
    """Attention blocks over frames, with the methods of a `Body`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_positions = StoredPositions(config)
        depth = config["num_hidden_layers"]
        self.layers = nn.ModuleList(WhisperLayer(config) for _ in range(depth))
        self.layer_norm = layer_norm(config)

    def project(self, x: Tensor) -> Tensor:
        return x

    def normalize_output(self, x: Tensor) -> Tensor:
        return self.layer_norm(x)


class StoredPositions(nn.Module):
    """Add the positions of the file, which are sinusoids and not trained: (B, U, D) -> same."""

    weight: Tensor  # (positions, D)

    def __init__(self, config: Config) -> None:
        super().__init__()
        count = config["max_source_positions"]
        self.register_buffer("weight", sinusoids(count, config["hidden_size"]))
        self.dropout = Dropout(config["hidden_dropout"])

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        # Frames after the last position share it: a padded batch may be longer. `check_positions`
        # refuses such utterances of a run, and the transcriber cuts them; `score` does not.
        positions = torch.arange(x.shape[1], device=x.device).clamp(max=len(self.weight) - 1)
        return self.dropout(x + self.weight[positions]), None  # in float32, also with autocast


def sinusoids(count: int, width: int) -> Tensor:
    """Return the positions that every Whisper has: (count, D)."""
    half = width // 2
    rates = SINUSOID_BASE ** (-torch.arange(half) / (half - 1))
    angles = torch.arange(count).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class WhisperLayer(nn.Module):
    """Attention and a feed-forward network, each after a norm: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.self_attn = Attention(config)
        self.self_attn.k_proj = nn.Linear(width, width, bias=False)
        self.self_attn_layer_norm = layer_norm(config)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = layer_norm(config)
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.dropout = Dropout(config["hidden_dropout"])
        self.activation_dropout = Dropout(config["activation_dropout"])

    def forward(self, x: Tensor, mask: Tensor, positions: None) -> Tensor:
        x = self.dropout.add(x, self.self_attn(self.self_attn_layer_norm(x), mask, positions))
        inner = self.activation(self.fc1(self.final_layer_norm(x)))
        return self.dropout.add(x, self.fc2(self.activation_dropout(inner)))
