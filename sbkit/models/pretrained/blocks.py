"""Modules shared by the families of pretrained encoders, and the span masks of their training.

Legend: B utterances, U frames, C channels, D width, H heads.

Sources of the masks: wav2vec 2.0 (Baevski et al. 2020, appendix B), SpecAugment (Park et al. 2019).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from sbkit.audio.random_draws import draw_uniform
from sbkit.models.transformer import attend

Config = Mapping[str, Any]  # sizes and dropout rates, by their keys in a `config.json`

# Keyed as in a `config.json`
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu}
LAYER_NORM_EPS = 1e-5  # for families whose files do not contain it


def layer_norm(config: Config) -> nn.LayerNorm:
    """Make a norm over the width of an encoder."""
    return nn.LayerNorm(config["hidden_size"], eps=config.get("layer_norm_eps", LAYER_NORM_EPS))


class Attention(nn.Module):
    """Attend to all frames of an utterance: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.p: float = config["attention_dropout"]
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, U, D/H)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.p if self.training else 0.0
        attended = attend(query, key, value, mask[:, None, None, :], bias=bias, dropout=dropout)
        return self.out_proj(attended)


def draw_spans(lengths: Tensor, size: int, prob: float, width: int) -> Tensor:
    """Draw the masked positions of rows of these lengths: (B,) on the CPU -> (B, size) of bool.

    A row gets prob * length / width spans, rounded up or down at random, with distinct starts. A
    row shorter than a span gets none. Spans may overlap, so the masked share is below ``prob``: .49
    for a prob of .65 and a width of 10, and .40 for .5 and 64. The draws depend only
    on the utterance (`sbkit/audio/random_draws.py`), and the host never waits for the device.
    """
    num_starts = (lengths - width + 1).clamp(min=0)
    num_spans = (prob * lengths / width + draw_uniform(len(lengths))).long().minimum(num_starts)
    positions = torch.arange(size)
    priorities = draw_uniform(len(lengths), size)
    priorities.masked_fill_(positions >= num_starts.unsqueeze(1), -1.0)
    starts = priorities.topk(int(num_spans.max())).indices  # (B, N)
    is_start = torch.zeros(len(lengths), size, dtype=torch.int32)
    is_start.scatter_(1, starts, (positions[: starts.shape[1]] < num_spans.unsqueeze(1)).int())
    open_spans = is_start.cumsum(1)
    open_spans[:, width:] -= open_spans[:, :-width].clone()  # spans that have ended
    return open_spans > 0


def mask_spans(
    x: Tensor,
    lengths: Tensor,
    *,
    frames: tuple[float, int],
    channels: tuple[float, int],
    vector: Tensor | None,
) -> Tensor:
    """Mask spans of frames and of channels: (B, U, D), (B,) -> (B, U, D).

    frames, channels: prob and width for `draw_spans`.
    vector: replaces a masked frame, (D,); None: zeros. Masked channels become zero.
    """
    if frames[0] > 0:
        mask = draw_spans(lengths, x.shape[1], *frames).to(x.device, non_blocking=True)
        fill = x.new_zeros(()) if vector is None else vector.to(x.dtype)
        x = torch.where(mask.unsqueeze(-1), fill, x)
    if channels[0] > 0:
        num_channels = torch.full((x.shape[0],), x.shape[2])
        mask = draw_spans(num_channels, x.shape[2], *channels).to(x.device, non_blocking=True)
        x = x.masked_fill(mask.unsqueeze(1), 0.0)
    return x
