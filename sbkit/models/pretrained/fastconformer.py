"""FastConformer, the encoder of Parakeet, with the names that tensors have in its files.

Legend: B utterances, T frames of 10 ms, U frames of 80 ms, M mel bins, C channels, D width, H
heads.

Sources: Rekesh et al. 2023 (FastConformer), Dai et al. 2019 (Transformer-XL: sinusoids of
distances, and a bias of the query for them and for what frames hold).
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import length_mask
from sbkit.models.dropout import Dropout
from sbkit.models.pretrained.blocks import Attention, Config, Dropouts, FeedForward
from sbkit.models.pretrained.conformer import (
    ConformerLayer,
    Convolution,
    distance_scores,
    distances,
)

SINUSOID_BASE = 10_000.0
LEAST_VARIANCE = 1e-5  # added to that of a channel


class StridedConvs(nn.Module):
    """Subsample by strided convolutions of the spectrogram: (B, T, M), (B,) -> (B, U, D), (B,).

    What lies past an utterance is zero before each. All but the first are depthwise, and followed
    by one that mixes channels.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels = config["subsampling_conv_channels"]
        self.kernel: int = config["subsampling_conv_kernel_size"]
        self.stride: int = config["subsampling_conv_stride"]
        self.padding = (self.kernel - 1) // 2
        self.count = int(config["subsampling_factor"]).bit_length() - 1  # its power of two
        sizes = {"kernel_size": self.kernel, "stride": self.stride, "padding": self.padding}
        self.layers = nn.ModuleList([nn.Conv2d(1, channels, **sizes), nn.ReLU()])
        for _ in range(self.count - 1):
            depthwise = nn.Conv2d(channels, channels, **sizes, groups=channels)
            self.layers += [depthwise, nn.Conv2d(channels, channels, 1), nn.ReLU()]
        bins = config["num_mel_bins"] // self.stride**self.count
        self.linear = nn.Linear(channels * bins, config["hidden_size"])

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve, and project what is left of a spectrum."""
        x = features.unsqueeze(1)  # (B, 1, T, M)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
                x = x * length_mask(lengths, x.shape[2], x.device)[:, None, :, None]
                lengths = self._strided(lengths)
            x = layer(x)
        projected: Tensor = self.linear(
            x.transpose(1, 2).flatten(2)
        )  # (B, C, U, M / 8) -> (B, U, D)
        return projected, lengths

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Count the frames that are left: (B,) -> (B,)."""
        for _ in range(self.count):
            lengths = self._strided(lengths)
        return lengths

    def _strided(self, lengths: Tensor) -> Tensor:
        left: Tensor = lengths + 2 * self.padding - self.kernel + self.stride
        return left.clamp(min=0) // self.stride  # clipped first, as ONNX rounds to zero


class FastConformer(nn.Module):
    """Conformer layers over subsampled frames; called as `Wav2Vec2` is."""

    def __init__(self, config: Config, dropouts: Dropouts) -> None:
        super().__init__()
        self.scale = config["hidden_size"] ** 0.5 if config["scale_input"] else 1.0
        self.dropout = Dropout(dropouts.hidden)
        layers = [_layer(config, dropouts) for _ in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(layers)

    def project(self, x: Tensor) -> Tensor:
        """Scale frames, which the front-end has projected: (B, U, D) -> (B, U, D)."""
        return x * self.scale

    def begin(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return sinusoids of each distance, too: -> (B, U, D), (2U, D)."""
        behind = distances(x.shape[1], x.device)
        angles = behind.unsqueeze(1) * frequencies(x.shape[2], x.device)
        return self.dropout(x), torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def finish(self, x: Tensor) -> Tensor:
        """Return x, which its layer has normalized."""
        return x


@lru_cache(maxsize=8)
def frequencies(width: int, device: torch.device) -> Tensor:
    """Return those of the sinusoids, in radians of a frame: (D / 2,)."""
    return 1 / SINUSOID_BASE ** (torch.arange(0, width, 2, device=device) / width)


def _layer(config: Config, dropouts: Dropouts) -> ConformerLayer:
    width, side = config["hidden_size"], (config["conv_kernel_size"] - 1) // 2
    norm = ("norm", FrozenBatchNorm(width))

    def feed_forward() -> FeedForward:
        names, bias = ("linear1", "linear2"), config["attention_bias"]
        return FeedForward(config, dropouts.activation, names, bias=bias)

    return ConformerLayer(
        dropouts.hidden,
        norm_feed_forward1=nn.LayerNorm(width),
        feed_forward1=feed_forward(),
        norm_self_att=nn.LayerNorm(width),
        self_attn=SinusoidAttention(config, dropouts.attention),
        norm_conv=nn.LayerNorm(width),
        conv=Convolution(config, side, side, norm, bias=config["convolution_bias"]),
        norm_feed_forward2=nn.LayerNorm(width),
        feed_forward2=feed_forward(),
        norm_out=nn.LayerNorm(width),
    )


class SinusoidAttention(Attention):
    """Attention that sinusoids of the distance add to, with one bias of the query for each."""

    def __init__(self, config: Config, dropout: float) -> None:
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        super().__init__(config, dropout, names, bias=config["attention_bias"])
        width = config["hidden_size"]
        self.relative_k_proj = nn.Linear(width, width, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.bias_v = nn.Parameter(torch.zeros(self.heads, width // self.heads))

    def place(
        self, query: Tensor, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Score distances; context (2U, D): sinusoids of each."""
        keys = self.relative_k_proj(context).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scores = distance_scores(query + self.bias_v.unsqueeze(1), keys)  # keys (H, 2U, D/H)
        return query + self.bias_u.unsqueeze(1), scores


class FrozenBatchNorm(nn.Module):
    """Normalize by the statistics of pretraining, also in training: (B, U, D) -> (B, U, D).

    By those of a batch, an utterance would depend on what it is batched with, and the weights on
    the number of processes. ``weight`` and ``bias`` learn.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift each channel."""
        scale = self.weight * (self.running_var + LEAST_VARIANCE).rsqrt()
        return torch.addcmul(self.bias - self.running_mean * scale, x, scale)
