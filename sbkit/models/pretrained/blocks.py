"""What the families of pretrained encoders have in common.

Legend: B utterances, U frames, D width, H heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from sbkit.models.dropout import Dropout

Config = Mapping[str, Any]  # sizes, by their names in a `config.json`

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the names in a `config.json`
    "gelu": gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
}


@dataclass(frozen=True, kw_only=True)
class Dropouts:
    """The dropout rates of an encoder.

    projection: of what the projected features are; hidden: of what a block adds; activation:
    within a feed-forward; attention: of attention weights.
    """

    projection: float = 0.0
    hidden: float = 0.0
    activation: float = 0.0
    attention: float = 0.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend to the frames of each utterance: 3 x (B, H, U, D/H) -> (B, U, H * D/H).

    mask (B, U): true within an utterance; bias (B, H, U, U): added to the scores.
    """
    allowed = mask[:, None, None, :]
    if bias is not None or torch.compiler.is_exporting():
        added = query.new_zeros(()) if bias is None else bias.to(query.dtype)
        allowed = torch.where(allowed, added, torch.finfo(query.dtype).min)
    if torch.compiler.is_exporting():  # PyTorch's guard of rows without frames is slow in ONNX
        scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5 + allowed
        out = torch.matmul(scores.softmax(-1), value)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attend to all frames of an utterance: (B, U, D), (B, U) -> (B, U, D).

    names: of the projections of query, key, value and output in the files.
    """

    def __init__(
        self,
        config: Config,
        dropout: float,
        names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads: int = config["num_attention_heads"]
        self.p, self.names = dropout, names
        for name in names:
            self.add_module(name, nn.Linear(config["hidden_size"], config["hidden_size"], bias))

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None) -> Tensor:
        """Attend where ``mask`` (B, U) is true."""
        *projections, out_proj = (getattr(self, name) for name in self.names)
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, U, D/H)
            for project in projections
        )
        query, bias = self.place(query, x, context)
        dropout = self.p if self.training else 0.0
        attended: Tensor = out_proj(attend(query, key, value, mask, bias=bias, dropout=dropout))
        return attended

    def place(
        self, query: Tensor, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the query, and what positions add to the scores, here nothing."""
        return query, None


class FeedForward(nn.Module):
    """Project up, and down again: (B, U, D) -> (B, U, D).

    names: of the two projections in the files.
    """

    def __init__(
        self,
        config: Config,
        dropout: float,
        names: tuple[str, str] = ("intermediate_dense", "output_dense"),
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.names = names
        self.add_module(names[0], nn.Linear(width, inner, bias))
        self.activation, self.dropout = ACTIVATIONS[config["hidden_act"]], Dropout(dropout)
        self.add_module(names[1], nn.Linear(inner, width, bias))

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        up, down = (getattr(self, name) for name in self.names)
        projected: Tensor = down(self.dropout(self.activation(up(x))))
        return projected
