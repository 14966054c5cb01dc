"""w2v-BERT 2.0 and FastConformer, the encoder of Parakeet, with the tensor names of their files.

Legend: B utterances, T frames of 10 ms, U frames of 20 ms (w2v-BERT) or 80 ms, M mel bins, C
channels, D width, H heads.

Sources: Gulati et al. 2020 (Conformer), Chung et al. 2021 (w2v-BERT), Seamless Communication 2023
(2.0), Rekesh et al. 2023 (FastConformer), Shaw et al. 2018 (embeddings of distances), Dai et al.
2019 (Transformer-XL: sinusoids of distances, one bias of the query for distances and one for
content, and the scores of all distances from one product).
"""

from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, linear, pad

from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.models.layers import Dropout, FrameConv
from sbkit.models.pretrained.blocks import (
    ACTIVATIONS,
    Attention,
    Body,
    Config,
    FeatureProjection,
    FeedForwardModule,
    PositionedQuery,
    layer_norm,
)

SINUSOID_BASE = 10_000.0
BATCH_NORM_EPS = 1e-5


class ConformerLayer(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each after a norm; a norm.

    parts: these nine modules in the order of their calls, keyed by their names in the files.
    """

    def __init__(self, config: Config, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)
        self.dropout = Dropout(config["hidden_dropout"])

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Apply the parts: (B, U, D), (B, U), the body's `embed_positions` -> (B, U, D)."""
        parts = [getattr(self, name) for name in self.names]
        norm1, feed1, norm2, attention, norm3, convolution, norm4, feed2, last_norm = parts
        x = self.dropout.add(x, feed1(norm1(x)), 0.5)
        x = self.dropout.add(x, attention(norm2(x), mask, positions))
        x = self.dropout.add(x, convolution(norm3(x), mask))
        x = self.dropout.add(x, feed2(norm4(x)), 0.5)
        return last_norm(x)


class ConvolutionModule(nn.Module):
    """Gate, depthwise convolution, norm, activation: (B, U, D), (B, U) -> (B, U, D).

    A frame sees ``past`` and ``future`` frames. ``norm``: its name in the files, and the module.
    """

    def __init__(
        self, config: Config, past: int, future: int, norm: tuple[str, nn.Module], *, bias: bool
    ) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.sides = (past, future)
        self.norm_name = norm[0]
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.pointwise_conv1 = PointwiseConv(width, 2 * width, 1, bias=bias)
        self.depthwise_conv = FrameConv(width, width, past + 1 + future, groups=width, bias=bias)
        self.add_module(*norm)
        self.pointwise_conv2 = PointwiseConv(width, width, 1, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Convolve; frames outside the utterance count as zero."""
        y = glu(self.pointwise_conv1(x)) * mask.unsqueeze(-1)
        y = getattr(self, self.norm_name)(self.depthwise_conv(pad(y, (0, 0, *self.sides))))
        return self.pointwise_conv2(self.activation(y))


class PointwiseConv(nn.Conv1d):
    """A linear layer per frame, stored as a convolution in its file: (B, U, D) -> (B, U, D')."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.squeeze(-1), self.bias)


def distances(length: int, device: torch.device) -> Tensor:
    """Return the position of a query minus that of a key, from U - 1 down to -U: (2U,)."""
    return torch.arange(length - 1, -length - 1, -1, device=device)


def distance_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Score frames by their distance: (B, H, U, D/H), (H or 1, 2U, D/H) -> (B, H, U, U).

    keys: one for each of `distances`. Query i needs U columns of its row of the product, the first
    of which is U - 1 - i. In the flat product they start at U - 1 + i (2U - 1), so that one reshape
    aligns all rows.
    """
    length = query.shape[2]
    scale = query.shape[3] ** -0.5
    scores = (query * scale @ keys.transpose(-1, -2)).flatten(2)  # (B, H, U * 2U)
    rows = scores[..., length - 1 : -1].reshape(*query.shape[:3], 2 * length - 1)
    return rows[..., :length]


class StackedFrames(nn.Module):
    """Concatenate neighboring frames: (B, T, M), (B,) -> (B, U, 2M), (B,)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stride: int = config["stride"]
        self.subsampling = Subsampling(self.stride)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if features.shape[1] < self.stride:  # so that there is a frame
            features = pad(features, (0, 0, 0, self.stride - features.shape[1]))
        end = features.shape[1] - self.stride + 1
        columns = [features[:, first : end + first : self.stride] for first in range(self.stride)]
        return torch.cat(columns, -1), self.subsampling.count(lengths)


class W2vBert(Body):
    """Conformer layers over stacked frames."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.min_distance = -config["left_max_position_embeddings"]
        self.max_distance = config["right_max_position_embeddings"]
        self.feature_projection = FeatureProjection(config, config["feature_projection_input_dim"])
        self.dropout = Dropout(config["hidden_dropout"])
        self.encoder = nn.Module()
        parts = (_w2v_bert_parts(config) for _ in range(config["num_hidden_layers"]))
        self.encoder.layers = nn.ModuleList(ConformerLayer(config, part) for part in parts)

    def embed_positions(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, and the embedding row of each distance: -> (B, U, D), (2U,)."""
        ahead = (-distances(x.shape[1], x.device)).clamp(self.min_distance, self.max_distance)
        return self.dropout(x), ahead - self.min_distance


def _w2v_bert_parts(config: Config) -> dict[str, nn.Module]:
    return {
        "ffn1_layer_norm": layer_norm(config),
        "ffn1": FeedForwardModule(config),
        "self_attn_layer_norm": layer_norm(config),
        "self_attn": ShawAttention(config),
        "conv_norm": nn.Identity(),  # conv_module has its own
        "conv_module": CausalConvolution(config),
        "ffn2_layer_norm": layer_norm(config),
        "ffn2": FeedForwardModule(config),
        "final_layer_norm": layer_norm(config),
    }


class ShawAttention(Attention):
    """Attention with a score bias from distance embeddings."""

    names = ("linear_q", "linear_k", "linear_v", "linear_out")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        count = config["left_max_position_embeddings"] + config["right_max_position_embeddings"] + 1
        self.distance_embedding = nn.Embedding(count, config["hidden_size"] // self.heads)

    def add_positions(self, query: Tensor, x: Tensor, positions: Tensor | None) -> PositionedQuery:
        """Score distances; positions (2U,): the embedding row of each."""
        return query, distance_scores(query, self.distance_embedding(positions).unsqueeze(0))


class CausalConvolution(ConvolutionModule):
    """Normalize, and convolve with past frames only: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        norm = ("depthwise_layer_norm", layer_norm(config))
        super().__init__(config, config["conv_depthwise_kernel_size"] - 1, 0, norm, bias=False)
        self.layer_norm = layer_norm(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x), mask)


class StridedConvs(nn.Module):
    """Subsample by strided convolutions of the spectrogram: (B, T, M), (B,) -> (B, U, D), (B,)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels = config["subsampling_conv_channels"]
        kernel: int = config["subsampling_conv_kernel_size"]
        stride: int = config["subsampling_conv_stride"]
        padding = (kernel - 1) // 2
        count = int(config["subsampling_factor"]).bit_length() - 1  # log2
        self.per_conv = Subsampling(stride, 2 * padding - kernel + stride)
        self.subsampling = reduce(Subsampling.then, [self.per_conv] * count)
        sizes: Any = {"kernel_size": kernel, "stride": stride, "padding": padding}
        self.layers = nn.ModuleList([nn.Conv2d(1, channels, **sizes), nn.ReLU()])
        for _ in range(count - 1):
            depthwise = nn.Conv2d(channels, channels, **sizes, groups=channels)
            self.layers += [depthwise, nn.Conv2d(channels, channels, 1), nn.ReLU()]
        bins = config["num_mel_bins"] // stride**count
        self.linear = nn.Linear(channels * bins, config["hidden_size"])

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features.unsqueeze(1)  # (B, 1, T, M)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
                x = x * length_mask(lengths, x.shape[2], x.device)[:, None, :, None]
                lengths = self.per_conv.count(lengths)
            x = layer(x)
        x = x.transpose(1, 2).flatten(2)  # (B, C, U, M / 8) -> (B, U, C * M / 8)
        return self.linear(x), lengths


class FastConformer(nn.Module):
    """Conformer layers over subsampled frames, with the methods of a `Body`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = config["hidden_size"] ** 0.5 if config["scale_input"] else 1.0
        self.dropout = Dropout(config["hidden_dropout"])
        parts = (_parakeet_parts(config) for _ in range(config["num_hidden_layers"]))
        self.layers = nn.ModuleList(ConformerLayer(config, part) for part in parts)

    def project(self, x: Tensor) -> Tensor:
        """Scale frames; the front-end has projected them: (B, U, D) -> (B, U, D)."""
        return x * self.scale

    def embed_positions(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, and sinusoids of each distance: -> (B, U, D), (2U, D)."""
        positions = distances(x.shape[1], x.device).unsqueeze(1)
        angles = positions * frequencies(x.shape[2], x.device)
        return self.dropout(x), torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def normalize_output(self, x: Tensor) -> Tensor:
        return x


@lru_cache(maxsize=8)
def frequencies(width: int, device: torch.device) -> Tensor:
    """Return the frequencies of the sinusoids, in radians per frame: (D / 2,)."""
    return 1 / SINUSOID_BASE ** (torch.arange(0, width, 2, device=device) / width)


def _parakeet_parts(config: Config) -> dict[str, nn.Module]:
    side = (config["conv_kernel_size"] - 1) // 2
    bias = config["attention_bias"]
    names = ("linear1", "linear2")
    norm = ("norm", FrozenBatchNorm(config["hidden_size"]))
    return {
        "norm_feed_forward1": layer_norm(config),
        "feed_forward1": FeedForwardModule(config, names, bias=bias),
        "norm_self_att": layer_norm(config),
        "self_attn": SinusoidAttention(config),
        "norm_conv": layer_norm(config),
        "conv": ConvolutionModule(config, side, side, norm, bias=config["convolution_bias"]),
        "norm_feed_forward2": layer_norm(config),
        "feed_forward2": FeedForwardModule(config, names, bias=bias),
        "norm_out": layer_norm(config),
    }


class SinusoidAttention(Attention):
    """Attention with a score bias from sinusoids of the distance, and two biases of the query."""

    names = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, config: Config) -> None:
        super().__init__(config, bias=config["attention_bias"])
        width = config["hidden_size"]
        self.relative_k_proj = nn.Linear(width, width, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.bias_v = nn.Parameter(torch.zeros(self.heads, width // self.heads))

    def add_positions(self, query: Tensor, x: Tensor, positions: Tensor | None) -> PositionedQuery:
        """Score distances; positions (2U, D): the sinusoids of each."""
        keys = self.relative_k_proj(positions).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scores = distance_scores(query + self.bias_v.unsqueeze(1), keys)  # keys (H, 2U, D/H)
        return query + self.bias_u.unsqueeze(1), scores


class FrozenBatchNorm(nn.Module):
    """Normalize by the statistics of pretraining, even in training: (B, U, D) -> (B, U, D).

    With a batch's own statistics, an utterance would depend on its batch, and the weights on the
    number of processes. ``weight`` and ``bias`` are trained.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        for name, buffer in nn.BatchNorm1d(width).named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + BATCH_NORM_EPS).rsqrt()
        return torch.addcmul(self.bias - self.running_mean * scale, x, scale)
