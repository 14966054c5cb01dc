"""What the families of pretrained encoders have in common.

Legend: B utterances, U frames, C channels, D width, H heads.

Hide spans of frames and of channels in training.

Legend: B utterances, U frames, D width.

Sources: wav2vec 2.0 (Baevski et al. 2020, appendix B), SpecAugment (Park et al. 2019). Spans may
overlap, so less is hidden than ``prob``: .49 of the frames with .65 and 10, .40 with .5 and 64.
They are drawn by utterance (`sbkit/audio/draws.py`), and nothing waits for the device.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from sbkit.audio.draws import draw_uniform
from sbkit.models.attention import attend
from sbkit.models.layers import Dropout

Config = Mapping[str, Any]  # sizes and dropout rates, by their names in a `config.json`

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the names in a `config.json`
    "gelu": gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
}
Placed = tuple[Tensor, Tensor | None]  # a query, and what positions add to its scores
LAYER_NORM_EPS = 1e-5  # of families whose files do not say it


def wide(device: torch.device) -> torch.dtype:
    """Return the type of sums over a clip.

    onnxruntime adds one number to the other: in float32, the variance of 40 s of audio was so far
    off that log-probabilities were by 6e-4.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def layer_norm(config: Config) -> nn.LayerNorm:
    """Make a norm over the width of an encoder."""
    return nn.LayerNorm(config["hidden_size"], eps=config.get("layer_norm_eps", LAYER_NORM_EPS))


class Body(nn.Module):
    """An encoder without its front-end, whose tensors have the names of its file.

    `project`, `begin`, each of `layers` and `finish` are called in this order.
    """

    encoder: Any
    feature_projection: Any

    @property
    def layers(self) -> Any:
        """Return the layers, each called with (x, mask, context)."""
        return self.encoder.layers

    def project(self, x: Tensor) -> Tensor:
        """Project features, of which some may be masked then: (B, U, C) -> (B, U, D)."""
        projected: Tensor = self.feature_projection(x)
        return projected

    def finish(self, x: Tensor) -> Tensor:
        """Return x, which its layer has normalized."""
        return x


class FeatureProjection(nn.Sequential):
    """Normalize features, and project them to the width of the encoder: (B, U, C) -> (B, U, D)."""

    def __init__(self, config: Config, channels: int) -> None:
        norm = nn.LayerNorm(channels, eps=config["layer_norm_eps"])
        is_normed = config.get("feat_proj_layer_norm", True)
        super().__init__(
            OrderedDict(
                layer_norm=norm if is_normed else nn.Identity(),
                projection=nn.Linear(channels, config["hidden_size"]),
                dropout=Dropout(config["feat_proj_dropout"]),
            )
        )


class Attention(nn.Module):
    """Attend to all frames of an utterance: (B, U, D), (B, U) -> (B, U, D).

    names: of the projections of query, key, value and output in the files.
    """

    names = ("q_proj", "k_proj", "v_proj", "out_proj")

    def __init__(self, config: Config, *, bias: bool = True) -> None:
        super().__init__()
        self.heads: int = config["num_attention_heads"]
        self.p: float = config["attention_dropout"]
        for name in self.names:
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
        attended = attend(query, key, value, mask[:, None, None, :], bias=bias, dropout=dropout)
        projected: Tensor = out_proj(attended)
        return projected

    def place(self, query: Tensor, x: Tensor, context: Tensor | None) -> Placed:
        """Return the query, and what positions add to the scores, here nothing."""
        return query, None


class FeedForward(nn.Module):
    """Project up, and down again: (B, U, D) -> (B, U, D).

    names: of the two projections in the files.
    """

    def __init__(
        self,
        config: Config,
        names: tuple[str, str] = ("intermediate_dense", "output_dense"),
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.names = names
        self.add_module(names[0], nn.Linear(width, inner, bias))
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.dropout = Dropout(config["activation_dropout"])
        self.add_module(names[1], nn.Linear(inner, width, bias))

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        up, down = (getattr(self, name) for name in self.names)
        projected: Tensor = down(self.dropout(self.activation(up(x))))
        return projected


def draw_spans(lengths: Tensor, size: int, prob: float, width: int) -> Tensor:
    """Draw what is hidden of rows of these lengths: (B,) on the CPU -> (B, size) of bool.

    A row gets prob * length / width spans, rounded up or down at random, each at another place
    within it. A row shorter than a span gets none.
    """
    places = (lengths - width + 1).clamp(min=0)
    spans = (prob * lengths / width + draw_uniform(len(lengths))).long().minimum(places)
    at = torch.arange(size)
    order = draw_uniform(len(lengths), size).masked_fill_(at >= places.unsqueeze(1), -1.0)
    chosen = order.topk(int(spans.max())).indices  # (B, N)
    first = torch.zeros(len(lengths), size, dtype=torch.int32)
    first.scatter_(1, chosen, (at[: chosen.shape[1]] < spans.unsqueeze(1)).int())
    begun = first.cumsum(1)
    begun[:, width:] -= begun[:, :-width].clone()  # spans that have ended
    return begun > 0


def mask_spans(
    x: Tensor,
    lengths: Tensor,
    *,
    frames: tuple[float, int],
    channels: tuple[float, int],
    vector: Tensor | None,
) -> Tensor:
    """Hide frames and channels, each by (prob, width): (B, U, D), (B,) -> (B, U, D).

    vector (D,): what stands in the place of a hidden frame; None: zeros. Channels become zero.
    """
    if frames[0] > 0:
        hidden = draw_spans(lengths, x.shape[1], *frames).to(x.device, non_blocking=True)
        instead = x.new_zeros(()) if vector is None else vector.to(x.dtype)
        x = torch.where(hidden.unsqueeze(-1), instead, x)
    if channels[0] > 0:
        widths = torch.full((x.shape[0],), x.shape[2])
        hidden = draw_spans(widths, x.shape[2], *channels).to(x.device, non_blocking=True)
        x = x.masked_fill(hidden.unsqueeze(1), 0.0)
    return x
