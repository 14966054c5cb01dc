"""What the pretrained Conformers have in common.

Legend: B utterances, U frames, D width, H heads.

Sources: Gulati et al. 2020 (Conformer), Dai et al. 2019 (Transformer-XL, appendix B: scores of all
distances from one product).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, linear, pad

from sbkit.models.dropout import Dropout
from sbkit.models.frame_conv import FrameConv
from sbkit.models.pretrained.blocks import ACTIVATIONS, Config


class ConformerLayer(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each after a norm; a norm.

    parts: these nine in the order of their calls, by the names that they have in the files.
    """

    def __init__(self, dropout: float, **parts: nn.Module) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor) -> Tensor:
        """Apply them: (B, U, D), (B, U), what tells distances -> (B, U, D)."""
        parts = [getattr(self, name) for name in self.names]
        norm1, forward1, norm2, attention, norm3, convolution, norm4, forward2, last_norm = parts
        x = self.dropout.add(x, forward1(norm1(x)), 0.5)
        x = self.dropout.add(x, attention(norm2(x), mask, context))
        x = self.dropout.add(x, convolution(norm3(x), mask))
        x = self.dropout.add(x, forward2(norm4(x)), 0.5)
        normed: Tensor = last_norm(x)
        return normed


class Convolution(nn.Module):
    """Gate, depthwise convolution, norm, activation: (B, U, D), (B, U) -> (B, U, D).

    norm: with the name that it has in the files; left, right: frames that a frame sees.
    """

    def __init__(
        self, config: Config, left: int, right: int, norm: tuple[str, nn.Module], *, bias: bool
    ) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.sides, self.norm_name = (left, right), norm[0]
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.pointwise_conv1 = PointwiseConv(width, 2 * width, bias=bias)
        self.depthwise_conv = FrameConv(width, width, left + 1 + right, groups=width, bias=bias)
        self.add_module(*norm)
        self.pointwise_conv2 = PointwiseConv(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Convolve; what lies beyond the ends of an utterance counts as zero."""
        y = glu(self.pointwise_conv1(x)) * mask.unsqueeze(-1)
        y = getattr(self, self.norm_name)(self.depthwise_conv(pad(y, (0, 0, *self.sides))))
        convolved: Tensor = self.pointwise_conv2(self.activation(y))
        return convolved


class PointwiseConv(nn.Conv1d):
    """A linear layer of each frame, as a convolution in its file: (B, U, D) -> (B, U, D')."""

    def __init__(self, width: int, out_width: int, *, bias: bool) -> None:
        super().__init__(width, out_width, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Project."""
        return linear(x, self.weight.squeeze(-1), self.bias)


def distances(length: int, device: torch.device) -> Tensor:
    """Return how far a frame may lie behind another, falling: U - 1 to -U, (2U,)."""
    return torch.arange(length - 1, -length - 1, -1, device=device)


def distance_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Score frames by their distance: (B, H, U, D/H), (H or 1, 2U, D/H) -> (B, H, U, U).

    keys: of each of `distances`. Row i of the product has those of its frames from U - 1 - i on,
    which is U - 1 from the first row's begin, and then every 2U - 1.
    """
    length, scale = query.shape[2], query.shape[3] ** -0.5
    scores = (query * scale @ keys.transpose(-1, -2)).flatten(2)  # (B, H, U * 2U)
    rows: Tensor = scores[..., length - 1 : -1].reshape(*query.shape[:3], 2 * length - 1)
    return rows[..., :length]
