"""What the families of pretrained encoders have in common.

Legend: B utterances, U frames, H heads, D/H channels of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

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
