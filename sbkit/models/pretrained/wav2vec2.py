"""wav2vec 2.0, HuBERT and WavLM, with the tensor names of their files.

Legend: B utterances, S samples, T frames of a convolution, K samples of its window, U frames of
20 ms, C channels, D width, H heads. A mask (B, U) is true within utterances.

Sources: Baevski et al. 2020 (wav2vec 2.0), Hsu et al. 2021 (HuBERT), Chen et al. 2022 (WavLM: a
bias of attention by relative position, gated by the query). XLS-R and MMS are wav2vec 2.0.

`feat_extract_norm` is `layer`, where each convolution normalizes over channels, or `group`, where
only the first does, over time.
"""

import math
from functools import reduce
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.parametrizations import weight_norm

from sbkit.audio.lengths import Subsampling, length_mask, sum_dtype
from sbkit.models.layers import Dropout, FrameConv, StridedConv
from sbkit.models.pretrained.blocks import ACTIVATIONS, Attention, Config, layer_norm


class ConvEncoder(nn.Module):
    """Convolve audio without padding: (B, S, 1), (B,) -> (B, U, C), (B,).

    The samples of a frame all lie within the clip, so no frame sees the padding.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = list(zip(config["conv_kernel"], config["conv_stride"], strict=True))
        self.conv_layers = nn.ModuleList(ConvLayer(config, i) for i in range(len(sizes)))
        self.min_samples = 1  # for one frame
        for kernel, stride in reversed(sizes):
            self.min_samples = (self.min_samples - 1) * stride + kernel
        self.subsampling = reduce(Subsampling.then, starmap(Subsampling.of_windows, sizes))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve; of audio too short for one frame, return a frame of padding and length 0."""
        if x.shape[1] < self.min_samples:
            x = pad(x, (0, 0, 0, self.min_samples - x.shape[1]))
        for layer in self.conv_layers:
            x, lengths = layer(x, lengths)
        return x, lengths


class ConvLayer(nn.Module):
    """Strided convolution, norm and activation: (B, T, C), (B,) -> (B, T', C'), (B,)."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        in_channels, channels = (1, *config["conv_dim"])[index : index + 2]
        kernel = config["conv_kernel"][index]
        stride = config["conv_stride"][index]
        self.subsampling = Subsampling.of_windows(kernel, stride)
        self.conv = StridedConv(in_channels, channels, kernel, stride, bias=config["conv_bias"])
        nn.init.kaiming_normal_(self.conv.weight)
        self.layer_norm: nn.Module | None = None
        if config["feat_extract_norm"] == "layer":
            self.layer_norm = nn.LayerNorm(channels)
        elif index == 0:
            self.layer_norm = nn.GroupNorm(channels, channels)
        self.activation = ACTIVATIONS[config["feat_extract_activation"]]

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = self.subsampling.count(lengths)
        if isinstance(self.layer_norm, nn.GroupNorm):
            x = self._convolve_and_normalize(x.squeeze(-1), lengths, self.layer_norm)
        else:
            x = self.conv(x)
            x = x if self.layer_norm is None else self.layer_norm(x)
        return self.activation(x), lengths

    def _convolve_and_normalize(self, audio: Tensor, lengths: Tensor, norm: nn.GroupNorm) -> Tensor:
        """Convolve and normalize each channel over a clip's own frames: (B, S), (B,) -> (B, T, C).

        PyTorch's group norm includes the padding (fairseq issue #3227). A convolution is linear, so
        the mean and variance of its output follow from the mean and covariance of its windows.
        Scaling the weights by them normalizes the output, so (B, T, C) is written only once. The
        statistics are computed in float64, because the variance may be a small difference.
        """
        windows = audio.unfold(1, self.conv.kernel_size[0], self.conv.stride[0])  # (B, T, K)
        mask = length_mask(lengths, windows.shape[1], audio.device).unsqueeze(-1)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        dtype = sum_dtype(audio.device)
        mean = (windows * mask).sum(1, keepdim=True, dtype=dtype) / count  # (B, 1, K)
        centered = (windows - mean) * mask
        covariance = torch.einsum("btj,btk->bjk", centered, centered) / count  # (B, K, K)
        weight = self.conv.weight.squeeze(1).to(dtype)  # (C, K)
        # The bias cancels, but DDP waits for its gradient, which is then zero.
        bias = 0.0 if self.conv.bias is None else self.conv.bias.unsqueeze(1)
        # The weights are the left factor: onnxruntime would quantize a right factor to int8.
        variance = (weight @ covariance * weight).sum(2, keepdim=True)  # (B, C, 1)
        scale = norm.weight.unsqueeze(1) * (variance + norm.eps).rsqrt()
        # Without a transposition beside the product: onnxruntime before 1.26 would join both to an
        # operation that it only has in float32.
        product = torch.einsum("ck,btk->bct", weight, mean)
        shift = norm.bias.unsqueeze(1) + scale * (bias - (product + bias))
        folded = (weight * scale).mT.to(audio.dtype)  # (B, K, C)
        return torch.baddbmm(shift.mT.to(audio.dtype), windows, folded)


class Wav2Vec2(nn.Module):
    """Attention blocks over features. A convolution adds the positions to the features.

    `PretrainedEncoder` calls `project`, `embed_positions`, each of `layers` with
    (x, mask, positions), and `normalize_output`.
    """

    encoder: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_first: bool = config["do_stable_layer_norm"]
        self.feature_projection = FeatureProjection(config, config["conv_dim"][-1])
        self.encoder = nn.Module()
        self.encoder.pos_conv_embed = PositionalConv(config)
        self.encoder.layer_norm = layer_norm(config)
        self.encoder.dropout = Dropout(config["hidden_dropout"])
        depth = config["num_hidden_layers"]
        self.encoder.layers = nn.ModuleList(Wav2Vec2Block(config) for _ in range(depth))
        if config["model_type"] == "wavlm":  # all layers share it; the files store it in the first
            self.encoder.layers[0].attention.rel_attn_embed = RelativePositions(config)

    @property
    def layers(self) -> nn.ModuleList:
        return self.encoder.layers

    def project(self, x: Tensor) -> Tensor:
        """Project features, before they are masked: (B, U, C) -> (B, U, D)."""
        return self.feature_projection(x)

    def embed_positions(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add positions to x, and compute the attention bias of WavLM, None for other encoders.

        (B, U, D), mask (B, U) -> (B, U, D), (H, U, U). The convolution sees zeros in the padding.
        """
        x = x * mask.unsqueeze(-1)
        x = x + self.encoder.pos_conv_embed(x)
        embedding = getattr(self.encoder.layers[0].attention, "rel_attn_embed", None)
        position_bias = None if embedding is None else embedding(x.shape[1])
        x = x if self.norm_first else self.encoder.layer_norm(x)
        return self.encoder.dropout(x), position_bias

    def normalize_output(self, x: Tensor) -> Tensor:
        return self.encoder.layer_norm(x) if self.norm_first else x


class FeatureProjection(nn.Sequential):
    """Normalize features, and project them to the width of the encoder: (B, U, C) -> (B, U, D)."""

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        is_normed = config.get("feat_proj_layer_norm", True)
        norm = nn.LayerNorm(channels, eps=config["layer_norm_eps"]) if is_normed else nn.Identity()
        self.add_module("layer_norm", norm)
        self.add_module("projection", nn.Linear(channels, config["hidden_size"]))


class PositionalConv(nn.Module):
    """Compute positions by a wide convolution: (B, U, D) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, kernel = config["hidden_size"], config["num_conv_pos_embeddings"]
        groups = config["num_conv_pos_embedding_groups"]
        conv = FrameConv(width, width, kernel, padding=kernel // 2, groups=groups)
        nn.init.normal_(conv.weight, std=2 / math.sqrt(kernel * width))
        self.conv = weight_norm(conv, dim=2)
        self.activation = ACTIVATIONS[config["feat_extract_activation"]]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.conv(x)[:, : x.shape[1]])  # an even kernel adds a frame


class Wav2Vec2Block(nn.Module):
    """Attention and a feed-forward module: (B, U, D), mask (B, U) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_first: bool = config["do_stable_layer_norm"]
        is_wavlm = config["model_type"] == "wavlm"
        self.attention = GatedAttention(config) if is_wavlm else Attention(config)
        self.dropout = Dropout(config["hidden_dropout"])
        self.layer_norm = layer_norm(config)
        self.feed_forward = FeedForwardModule(config)
        self.final_layer_norm = layer_norm(config)

    def forward(self, x: Tensor, mask: Tensor, position_bias: Tensor | None) -> Tensor:
        if self.norm_first:
            x = self.dropout.add(x, self.attention(self.layer_norm(x), mask, position_bias))
            return self.dropout.add(x, self.feed_forward(self.final_layer_norm(x)))
        x = self.layer_norm(self.dropout.add(x, self.attention(x, mask, position_bias)))
        return self.final_layer_norm(self.dropout.add(x, self.feed_forward(x)))


class FeedForwardModule(nn.Module):
    """Project up, and down again: (B, U, D) -> (B, U, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        inner = config["intermediate_size"]
        self.intermediate_dense = nn.Linear(width, inner)
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.dropout = Dropout(config["activation_dropout"])
        self.output_dense = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(self.dropout(self.activation(self.intermediate_dense(x))))


class GatedAttention(Attention):
    """Attention with a bias by relative position, scaled by each query (WavLM, section 3.2)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gru_rel_pos_const = nn.Parameter(torch.ones(1, self.heads, 1, 1))
        self.gru_rel_pos_linear = nn.Linear(config["hidden_size"] // self.heads, 8)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
        """Attend with the shared bias, (H, U, U), scaled by gates of x."""
        assert bias is not None
        heads = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, U, D/H)
        gates = self.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        update, reset = gates.split(1, dim=-1)  # (B, H, U, 1)
        gated = (update * (reset * self.gru_rel_pos_const - 1) + 2) * bias  # (B, H, U, U)
        return super().forward(x, mask, gated)


class RelativePositions(nn.Embedding):
    """Embed bucketed relative positions as a bias for each head: -> (H, U, U).

    One half of the buckets is for frames to the left, the other for frames to the right. Within
    each, half of the buckets hold one distance each; the rest hold ranges that grow up to
    ``max_bucket_distance`` frames (Raffel et al. 2020, T5).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config["num_buckets"], config["num_attention_heads"])
        self.max_distance: int = config["max_bucket_distance"]

    def forward(self, frames: int) -> Tensor:  # type: ignore[override]
        positions = torch.arange(frames, device=self.weight.device)
        offset = positions.unsqueeze(0) - positions.unsqueeze(1)  # (U, U), from query to key
        distance = offset.abs()
        num_side_buckets = self.num_embeddings // 2  # for frames to the left, and to the right
        num_exact = num_side_buckets // 2  # distances with a bucket of their own
        log_range = math.log(self.max_distance / num_exact)
        growth = (distance.clamp(min=num_exact) / num_exact).log() / log_range
        range_bucket = (num_exact + growth * (num_side_buckets - num_exact)).long()
        range_bucket = range_bucket.clamp(max=num_side_buckets - 1)
        side_bucket = torch.where(distance < num_exact, distance, range_bucket)
        bucket = side_bucket + (offset > 0) * num_side_buckets
        return super().forward(bucket).permute(2, 0, 1)
