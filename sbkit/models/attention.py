"""Attention of one set of frames or tokens to another, also in exported graphs.

Legend: B utterances, H heads, U frames that attend, K frames that they attend to, D width, L tokens
or frames of left context.
Source: Su et al. 2021 (rotary positions).
"""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sbkit.models.layers import Dropout
from sbkit.models.streaming import last_frames

ROTARY_BASE = 10_000.0


class SelfAttention(nn.Module):
    """Attend with rotary positions, and add: (B, U, D) -> (B, U, D); causal without a mask."""

    def __init__(self, *, d_model: int, nhead: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.norm = nn.LayerNorm(d_model)
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend where ``mask`` is true.

        mask: (B, U) for all frames, or (B, 1, U, U) for each frame; None: each frame attends to
            itself and the frames before it.
        """
        heads = self.qkv_proj(self.norm(x)).unflatten(-1, (3, self.nhead, -1))  # (B, U, 3, H, D/H)
        cosine, sine = rotary_angles(x.shape[1], heads.shape[-1], x.device)
        query_key, value = heads.split((2, 1), dim=2)  # the gradient of a split is one copy
        query, key = rotate(query_key, cosine, sine).unbind(2)
        mask = mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask
        return self._attend(x, query, key, value.squeeze(2), mask)

    def forward_chunk(self, x: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the past, (B, L, 2, H, D/H), and the chunk, where ``mask`` is true.

        mask: (B, 1, 1, L + U). Keys are kept before rotation: only distances count, so positions
        may restart in each chunk.
        """
        heads = self.qkv_proj(self.norm(x)).unflatten(-1, (3, self.nhead, -1))
        query, key_value = heads[:, :, :1], torch.cat([past, heads[:, :, 1:]], 1)
        key, value = key_value[:, :, :1], key_value[:, :, 1:]  # (B, L + U, 1, H, D/H)
        left = past.shape[1]
        cosine, sine = rotary_angles(left + x.shape[1], heads.shape[-1], x.device)
        query, key = rotate(query, cosine[left:], sine[left:]), rotate(key, cosine, sine)
        out = self._attend(x, query.squeeze(2), key.squeeze(2), value.squeeze(2), mask)
        return out, last_frames(key_value, left)

    def _attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend and add to x: query (B, U, H, D/H), key and value (B, K, H, D/H) -> (B, U, D)."""
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return self.dropout.add(x, self.out_proj(attend(query, key, value, mask)))


class CrossAttention(nn.Module):
    """Attend from tokens to frames, and add: (B, L, D), (B, U, D) -> (B, L, D)."""

    def __init__(self, *, d_model: int, nhead: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.norm = nn.LayerNorm(d_model)
        self.q_proj = nn.Linear(d_model, d_model)
        self.kv_proj = nn.Linear(d_model, 2 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Attend to the frames where ``mask`` (B, U) is true."""
        query = self.q_proj(self.norm(x)).unflatten(-1, (self.nhead, -1)).transpose(1, 2)
        heads = self.kv_proj(states).unflatten(-1, (2, self.nhead, -1))
        key, value = heads.permute(2, 0, 3, 1, 4)  # 2 x (B, H, U, D/H)
        attended = attend(query, key, value, mask[:, None, None, :])
        return self.dropout.add(x, self.out_proj(attended))


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

    mask: of any shape that broadcasts to (B, H, U, K); None: causal attention.
    bias: added to the scores, (B, H, U, K); only with a mask.
    """
    is_exported = mask is not None and torch.compiler.is_exporting()
    if mask is not None and (is_exported or bias is not None):
        visible_bias = query.new_zeros(()) if bias is None else bias.to(query.dtype)
        mask = torch.where(mask, visible_bias, torch.finfo(query.dtype).min)
    if is_exported:  # else ONNX gets PyTorch's guard for rows without any frame: 8 % of the time
        scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5 + mask
        out = torch.matmul(scores.softmax(-1), value)
    else:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
    return out.transpose(1, 2).flatten(2)


def rotary_angles(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position times frequency, for `rotate`: 2 x (U, 1, 1, D/H).

    A pair is a channel of the first half and one of the second; the sine of the first is negative.
    """
    frequency = _frequencies if torch.compiler.is_dynamo_compiling() else _cached_frequencies
    angles = torch.arange(length, device=device).unsqueeze(1) * frequency(size, device)
    cosine, sine = angles.cos(), angles.sin()
    cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return cosine[:, None, None], sine[:, None, None]


def _frequencies(size: int, device: torch.device) -> Tensor:
    return ROTARY_BASE ** (-torch.arange(0, size, 2, device=device) / size)


# A constant in an exported graph: other runtimes round its powers differently, which at frame 950
# came to four times the error of all other operations (7e-5 of a log-probability).
_cached_frequencies = lru_cache(maxsize=8)(_frequencies)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels by the angle of its position: (B, U, ..., D/H) -> same.

    On whole rows: four products of halves and their gradients took twice as long.
    """
    rotated: Tensor = x * cosine + x.roll(x.shape[-1] // 2, -1) * sine
    return rotated.to(x.dtype)
