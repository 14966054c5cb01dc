"""wav2vec 2.0, HuBERT and WavLM, with the names that tensors have in their files.

Legend: B utterances, S samples, T frames of a convolution, U frames of 20 ms, C channels, D width,
H heads.

Sources: Baevski et al. 2020 (wav2vec 2.0), Hsu et al. 2021 (HuBERT), Chen et al. 2022 (WavLM: a
bias of attention by relative position, gated by the query). XLS-R and MMS are wav2vec 2.0. Each
convolution normalizes over channels (`layer`), or the first one over time (`group`); blocks
normalize what they add to (`do_stable_layer_norm`), or its sum.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.parametrizations import weight_norm

from sbkit.audio.lengths import length_mask
from sbkit.models.dropout import Dropout
from sbkit.models.frame_conv import FrameConv, StridedConv
from sbkit.models.pretrained.blocks import (
    ACTIVATIONS,
    Attention,
    Config,
    Dropouts,
    FeedForward,
)

LEAST_VARIANCE = 1e-7  # added to that of a clip


class NormalizedAudio(nn.Module):
    """Normalize each clip to mean 0 and variance 1: (B, S), (B,) -> (B, S, 1), (B,).

    Over its own samples; where ``do_normalize`` is false the audio stays as it is.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.do_normalize: bool = config["do_normalize"]

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize."""
        if not self.do_normalize:
            return audio.unsqueeze(-1), lengths
        mask = length_mask(lengths, audio.shape[1], audio.device)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        centred = (audio - (audio * mask).sum(1, keepdim=True) / count) * mask
        variance = centred.square().sum(1, keepdim=True) / count
        return (centred * (variance + LEAST_VARIANCE).rsqrt()).unsqueeze(-1), lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths: a frame is a sample."""
        return lengths


class ConvEncoder(nn.Module):
    """Convolve audio without padding: (B, S, 1), (B,) -> (B, U, C), (B,).

    A frame is one whose samples all lie within its clip, so padding is not seen.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths, norm = [1, *config["conv_dim"]], config["feat_extract_norm"]
        sizes = list(zip(config["conv_kernel"], config["conv_stride"], strict=True))
        self.conv_layers = nn.ModuleList(
            ConvLayer(
                widths[at],
                widths[at + 1],
                kernel=kernel,
                stride=stride,
                bias=config["conv_bias"],
                norm="none" if at and config["feat_extract_norm"] == "group" else norm,
                activation=config["feat_extract_activation"],
            )
            for at, (kernel, stride) in enumerate(sizes)
        )
        self.shortest = 1  # audio that makes a frame, in samples
        for kernel, stride in reversed(sizes):
            self.shortest = (self.shortest - 1) * stride + kernel

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve; audio shorter than a frame has none, beside the padding that is returned."""
        if x.shape[1] < self.shortest:
            x = pad(x, (0, 0, 0, self.shortest - x.shape[1]))
        for layer in self.conv_layers:
            x, lengths = layer(x, lengths)
        return x, lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames of audio: (B,) -> (B,)."""
        layer: Any
        for layer in self.conv_layers:
            lengths = layer.frame_lengths(lengths)
        return lengths


class ConvLayer(nn.Module):
    """A strided convolution, a norm and an activation: (B, T, C), (B,) -> (B, T', C'), (B,)."""

    def __init__(
        self,
        channels: int,
        out_channels: int,
        *,
        kernel: int,
        stride: int,
        bias: bool,
        norm: str,
        activation: str,
    ) -> None:
        super().__init__()
        self.conv = StridedConv(channels, out_channels, kernel, stride, bias=bias)
        nn.init.kaiming_normal_(self.conv.weight)
        self.norm = norm
        if norm == "group":
            self.layer_norm: Any = nn.GroupNorm(out_channels, out_channels)
        elif norm == "layer":
            self.layer_norm = nn.LayerNorm(out_channels)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve."""
        lengths = self.frame_lengths(lengths)
        x = self._normalized(x.squeeze(-1), lengths) if self.norm == "group" else self.conv(x)
        if self.norm == "layer":
            x = self.layer_norm(x)
        return self.activation(x), lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames that are left of lengths: (B,) -> (B,)."""
        left = lengths - self.conv.kernel_size[0] + self.conv.stride[0]
        return left.clamp(min=0) // self.conv.stride[0]  # clipped first, as ONNX rounds to zero

    def _normalized(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Convolve and normalize each channel over a clip's own frames: (B, S), (B,) -> (B, T, C).

        PyTorch's group norm takes padding along (fairseq issue #3227). Of a linear map, mean and
        variance follow from mean and covariance of its input, here of K samples, and both go into
        the weights: (B, T, C) is written once. In float64, as the variance may be a small
        difference.
        """
        windows = audio.unfold(1, self.conv.kernel_size[0], self.conv.stride[0])  # (B, T, K)
        mask = length_mask(lengths, windows.shape[1], audio.device).unsqueeze(-1)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        wide = torch.float32 if audio.device.type == "mps" else torch.float64
        mean = (windows * mask).sum(1, keepdim=True, dtype=wide) / count  # (B, 1, K)
        centred = (windows - mean) * mask
        covariance = centred.mT @ centred / count  # (B, K, K)
        weight, norm = self.conv.weight.squeeze(1).to(wide), self.layer_norm  # (C, K)
        bias = 0.0 if self.conv.bias is None else self.conv.bias.unsqueeze(1)
        # Weights on the left: onnxruntime would have the others in int8.
        variance = (weight @ covariance * weight).sum(2, keepdim=True)  # (B, C, 1)
        scale = norm.weight.unsqueeze(1) * (variance + norm.eps).rsqrt()
        shift = norm.bias.unsqueeze(1) + scale * (bias - (weight @ mean.mT + bias))
        folded = (weight * scale).mT.to(audio.dtype)  # (B, K, C)
        return torch.baddbmm(shift.mT.to(audio.dtype), windows, folded)


class FeatureProjection(nn.Sequential):
    """Normalize features, and project them to the width of the encoder: (B, U, C) -> (B, U, D)."""

    def __init__(self, config: Config, channels: int, dropout: float) -> None:
        norm = nn.LayerNorm(channels, eps=config["layer_norm_eps"])
        is_normed = config.get("feat_proj_layer_norm", True)
        super().__init__(
            OrderedDict(
                layer_norm=norm if is_normed else nn.Identity(),
                projection=nn.Linear(channels, config["hidden_size"]),
                dropout=Dropout(dropout),
            )
        )


class Wav2Vec2(nn.Module):
    """Blocks of attention over features that know their place by a convolution.

    `project`, `begin`, each of `layers` and `finish` are called in this order.
    """

    def __init__(self, config: Config, dropouts: Dropouts) -> None:
        super().__init__()
        width, channels = config["hidden_size"], config["conv_dim"][-1]
        eps = config["layer_norm_eps"]
        self.norm_first: bool = config["do_stable_layer_norm"]
        self.feature_projection = FeatureProjection(config, channels, dropouts.projection)
        is_wavlm = config["model_type"] == "wavlm"
        attention = GatedAttention if is_wavlm else Attention
        blocks = [
            Block(config, dropouts, attention(config, dropouts.attention))
            for _ in range(config["num_hidden_layers"])
        ]
        if is_wavlm:  # what all share has the name of the first
            blocks[0].attention.rel_attn_embed = RelativePositions(config)
        self.encoder: Any = nn.ModuleDict(
            {
                "pos_conv_embed": PositionalConv(config),
                "layer_norm": nn.LayerNorm(width, eps=eps),
                "dropout": Dropout(dropouts.hidden),
                "layers": nn.ModuleList(blocks),
            }
        )

    @property
    def layers(self) -> Any:
        """Return the blocks, each called with (x, mask, context)."""
        return self.encoder.layers

    def project(self, x: Tensor) -> Tensor:
        """Project features, of which some may be masked then: (B, U, C) -> (B, U, D)."""
        projected: Tensor = self.feature_projection(x)
        return projected

    def begin(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add positions, which see zeros past the end of an utterance.

        (B, U, D), (B, U) -> (B, U, D), and WavLM's bias of attention, (H, U, U).
        """
        x = x * mask.unsqueeze(-1)
        x = x + self.encoder.pos_conv_embed(x)
        positions = getattr(self.layers[0].attention, "rel_attn_embed", None)
        bias = None if positions is None else positions(x.shape[1])
        return self.encoder.dropout(x if self.norm_first else self.encoder.layer_norm(x)), bias

    def finish(self, x: Tensor) -> Tensor:
        """Normalize what a block returns, where blocks do not: (B, U, D) -> (B, U, D)."""
        finished: Tensor = self.encoder.layer_norm(x) if self.norm_first else x
        return finished


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
        """Convolve; an even kernel leaves a frame more than there were."""
        return self.activation(self.conv(x)[:, : x.shape[1]])


class Block(nn.Module):
    """Attention, feed-forward: (B, U, D), (B, U) -> (B, U, D)."""

    def __init__(self, config: Config, dropouts: Dropouts, attention: nn.Module) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.norm_first: bool = config["do_stable_layer_norm"]
        self.attention = attention
        self.dropout = Dropout(dropouts.hidden)
        self.layer_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(config, dropouts.activation)
        self.final_layer_norm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None) -> Tensor:
        """Apply both; ``mask`` (B, U) is true within an utterance."""
        if self.norm_first:
            x = self.dropout.add(x, self.attention(self.layer_norm(x), mask, context))
            return self.dropout.add(x, self.feed_forward(self.final_layer_norm(x)))
        x = self.layer_norm(self.dropout.add(x, self.attention(x, mask, context)))
        normed: Tensor = self.final_layer_norm(self.dropout.add(x, self.feed_forward(x)))
        return normed


class GatedAttention(Attention):
    """Attention with a bias by relative position, which each query scales (WavLM, section 3.2)."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__(config, dropout)
        self.gru_rel_pos_const = nn.Parameter(torch.ones(1, self.heads, 1, 1))
        self.gru_rel_pos_linear = nn.Linear(config["hidden_size"] // self.heads, 8)

    def place(
        self, query: Tensor, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scale the bias of all blocks: (B, U, D), (H, U, U) -> (B, H, U, U)."""
        assert context is not None
        heads = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, U, D/H)
        gates = self.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        update, reset = gates.split(1, dim=-1)  # (B, H, U, 1)
        return query, (update * (reset * self.gru_rel_pos_const - 1) + 2) * context


class RelativePositions(nn.Embedding):
    """The bias of each head by relative position, which has a bucket: -> (H, U, U).

    Half of the buckets are for frames to the left. Of each half, half are for one distance each,
    the others for ranges that grow up to ``max_bucket_distance`` frames (Raffel et al. 2020, T5).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config["num_buckets"], config["num_attention_heads"])
        self.max_distance: int = config["max_bucket_distance"]

    def forward(self, frames: int) -> Tensor:  # type: ignore[override]
        """Look up the bias of every frame for every other."""
        at = torch.arange(frames, device=self.weight.device)
        right = at.unsqueeze(0) - at.unsqueeze(1)  # (U, U), frames from the query to the key
        distance, buckets = right.abs(), self.num_embeddings // 2
        near = buckets // 2
        growth = (distance.clamp(min=near) / near).log() / math.log(self.max_distance / near)
        far = (near + growth * (buckets - near)).long().clamp(max=buckets - 1)
        bucket = torch.where(distance < near, distance, far) + (right > 0) * buckets
        return super().forward(bucket).permute(2, 0, 1)
