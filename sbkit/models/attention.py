"""Attention of one set of frames or tokens to another, also in exported graphs.

Legend: B utterances, H heads, U frames that attend, K frames that they attend to, D width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend where ``mask`` is true: (B, H, U, D/H), 2 x (B, H, K, D/H) -> (B, U, D).

    mask: of any shape that becomes (B, H, U, K); None: each attends to what was before it.
    bias (B, H, U, K): added to the scores, where there is a mask.
    """
    is_exported = mask is not None and torch.compiler.is_exporting()
    if mask is not None and (is_exported or bias is not None):
        added = query.new_zeros(()) if bias is None else bias.to(query.dtype)
        mask = torch.where(mask, added, torch.finfo(query.dtype).min)
    if is_exported:  # ONNX would have PyTorch's guard of rows without any frame: 8 % of the time
        scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5 + mask
        out = torch.matmul(scores.softmax(-1), value)
    else:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
    return out.transpose(1, 2).flatten(2)
