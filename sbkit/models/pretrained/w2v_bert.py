"""w2v-BERT 2.0, with the names that tensors have in its files.

Legend: B utterances, T frames of 10 ms, U frames of 20 ms, M mel bins, D width, H heads.

Sources: Chung et al. 2021 (w2v-BERT), Seamless Communication 2023 (2.0), Shaw et al. 2018
(embeddings of distances). The convolution sees only what lies before.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.models.dropout import Dropout
from sbkit.models.pretrained.blocks import Attention, Config, Dropouts, FeedForward
from sbkit.models.pretrained.conformer import (
    ConformerLayer,
    Convolution,
    distance_scores,
    distances,
)
from sbkit.models.pretrained.wav2vec2 import FeatureProjection


class StackedFrames(nn.Module):
    """Put neighbouring frames side by side: (B, T, M), (B,) -> (B, U, 2M), (B,)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stride: int = config["stride"]

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Stack; the last frame is left out where it has no neighbour."""
        if features.shape[1] < self.stride:  # so that a frame exists
            features = pad(features, (0, 0, 0, self.stride - features.shape[1]))
        end = features.shape[1] - self.stride + 1
        nth = [features[:, at : end + at : self.stride] for at in range(self.stride)]
        return torch.cat(nth, -1), self.frame_lengths(lengths)

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count what is left: (B,) -> (B,)."""
        return lengths // self.stride


class W2vBert(nn.Module):
    """Conformer layers over stacked frames; called as `Wav2Vec2` is."""

    def __init__(self, config: Config, dropouts: Dropouts) -> None:
        super().__init__()
        self.nearest = -config["left_max_position_embeddings"]
        self.farthest = config["right_max_position_embeddings"]
        channels = config["feature_projection_input_dim"]
        self.feature_projection = FeatureProjection(config, channels, dropouts.projection)
        self.dropout = Dropout(dropouts.hidden)
        layers = [_layer(config, dropouts) for _ in range(config["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    @property
    def layers(self) -> nn.Module:
        """Return the layers, each called with (x, mask, context)."""
        return self.encoder["layers"]

    def project(self, x: Tensor) -> Tensor:
        """Project frames: (B, U, 2M) -> (B, U, D)."""
        projected: Tensor = self.feature_projection(x)
        return projected

    def begin(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of the embeddings for each distance, too: -> (B, U, D), (2U,)."""
        ahead = -distances(x.shape[1], x.device)
        return self.dropout(x), ahead.clamp(self.nearest, self.farthest) - self.nearest

    def finish(self, x: Tensor) -> Tensor:
        """Return x, which its layer has normalized."""
        return x


def _layer(config: Config, dropouts: Dropouts) -> ConformerLayer:
    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    return ConformerLayer(
        dropouts.hidden,
        ffn1_layer_norm=norm(),
        ffn1=FeedForward(config, dropouts.activation),
        self_attn_layer_norm=norm(),
        self_attn=ShawAttention(config, dropouts.attention),
        conv_norm=nn.Identity(),  # it has its own
        conv_module=CausalConvolution(config),
        ffn2_layer_norm=norm(),
        ffn2=FeedForward(config, dropouts.activation),
        final_layer_norm=norm(),
    )


class ShawAttention(Attention):
    """Attention that embeddings of the distance add to."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__(config, dropout, ("linear_q", "linear_k", "linear_v", "linear_out"))
        count = config["left_max_position_embeddings"] + config["right_max_position_embeddings"] + 1
        self.distance_embedding = nn.Embedding(count, config["hidden_size"] // self.heads)

    def place(
        self, query: Tensor, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Score distances; context (2U,): the row of the embeddings for each."""
        return query, distance_scores(query, self.distance_embedding(context).unsqueeze(0))


class CausalConvolution(Convolution):
    """Normalize, and convolve with what lies before: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        norm = ("depthwise_layer_norm", nn.LayerNorm(width, eps=eps))
        super().__init__(config, config["conv_depthwise_kernel_size"] - 1, 0, norm, bias=False)
        self.layer_norm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply both."""
        return super().forward(self.layer_norm(x), mask)
