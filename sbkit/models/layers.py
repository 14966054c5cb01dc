"""Layers that several models share: convolutions with channels last, cheap dropout, feature norm.

Legend: B utterances, T frames, U frames of the encoder, C channels, D width, M mel bins.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from sbkit.base.errors import DataError
from sbkit.base.ranges import Count, PositiveCount
from sbkit.base.ranges import Dropout as DropoutRate


class LinearStack(nn.Sequential):
    """Linear, LayerNorm, LeakyReLU and dropout, ``layers`` times: (B, U, D) -> (B, U, D).

    It stands between an encoder and a head when fine-tuning. SpeechBrain's version has batch norms,
    whose statistics include the padding.
    """

    def __init__(self, *, size: PositiveCount, layers: Count, dropout: DropoutRate = 0.0) -> None:
        super().__init__()
        for _ in range(layers):
            block = (nn.Linear(size, size), nn.LayerNorm(size), nn.LeakyReLU(), Dropout(dropout))
            self.extend(block)


class FrameConv(nn.Conv1d):
    """Convolve over frames, padded with zeros: (B, T, C) -> (B, T', C').

    In float32 on the CPU it runs as a 2-D convolution of height one, with channels last in memory.
    PyTorch's conv1d copies such a tensor in and out: its depthwise kernel took 3.0 ms forward and
    backward, this one 1.0 ms (eight utterances of 180 frames, 144 channels, two cores). In bfloat16
    oneDNN's 2-D kernel never returns for 16 channels (torch 2.11).
    """

    ARGUMENTS: ClassVar = dict.fromkeys(
        ("in_channels", "out_channels", "kernel_size", "stride"), PositiveCount
    )

    def forward(self, x: Tensor) -> Tensor:
        return self._convolve_on_cpu(x) if x.device.type == "cpu" else self._convolve(x)

    def _convolve(self, x: Tensor) -> Tensor:
        # The gradients of the convolution and of a LayerNorm after it need contiguous inputs.
        return super().forward(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()

    # torch 2.11 would compile a convolution on the CPU anew for each size.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _convolve_on_cpu(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return self._convolve(x)
        convolved = conv2d(
            x.transpose(1, 2).unsqueeze(2),  # (B, C, 1, T)
            self.weight.unsqueeze(2),
            self.bias,
            stride=(1, *self.stride),
            padding=(0, int(self.padding[0])),
            dilation=(1, *self.dilation),
            groups=self.groups,
        )
        return convolved.squeeze(2).transpose(1, 2)


class StridedConv(FrameConv):
    """Convolve over frames with a stride, without padding or groups: (B, T, C) -> (B, T', C').

    On the CPU it adds matrix products over ``stride`` taps at a time, whose rows are views. Forward
    and backward of two clips of 8,000 frames, 512 channels, a kernel of 3 and a stride of 2 took
    0.50 s on one core; `FrameConv` took 2.08 s, and PyTorch's conv1d with channels first 0.67 s.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_exporting():
            return super().forward(x)
        (kernel,), (stride,) = self.kernel_size, self.stride
        taps = self.weight.permute(2, 1, 0)  # (K, C, C')
        frames = (x.shape[1] - kernel) // stride + 1
        group = stride if self.in_channels > 1 else kernel
        y = x.new_zeros(()) if self.bias is None else self.bias
        for start in range(0, kernel, group):
            group_taps = taps[start : start + group]
            rows = x[:, start:].unfold(1, len(group_taps), stride)[:, :frames]  # (B, T', C, taps)
            matrix = group_taps.flatten(0, 1).expand(x.shape[0], -1, -1)
            y = torch.baddbmm(y, rows.transpose(2, 3).flatten(2), matrix)
        return y


MAX_SEED = 2**63 - 1
DRAW_RANGE = 1 << 16  # a draw has 16 bits, so a rate is met to 1 part in 65536


class Dropout(nn.Module):
    """Set a share of the elements to zero and scale up the rest, in training only.

    On the CPU, PyTorch's dropout draws a Mersenne-Twister number for each element, one after the
    other: on two cores it took 23 % of a Conformer's training step. Here each number from NumPy's
    SFC64, seeded by PyTorch's generator, decides four elements.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p)
        return x * self._factors(x)

    def add(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Return x + weight * dropout(y), on the CPU in one pass over memory."""
        if self.training and self.p > 0.0 and y.device.type == "cpu" and x.dtype == y.dtype:
            return torch.addcmul(x, y, self._factors(y, weight))
        return torch.add(x, self(y), alpha=weight)

    def _factors(self, x: Tensor, weight: float = 1.0) -> Tensor:
        """Draw a factor for each element of x: zero, or the weight over the share that is kept."""
        if self.p == 1.0:
            return torch.zeros_like(x)
        dropped = min(round(self.p * DRAW_RANGE), DRAW_RANGE - 1)
        draw = _draw_compiled if torch.compiler.is_compiling() else _draw
        draws = draw(torch.randint(MAX_SEED, ()), x.numel()).view(x.shape).to(torch.float32)
        scale = weight * DRAW_RANGE / (DRAW_RANGE - dropped)
        factors = draws.ge_(dropped - DRAW_RANGE // 2).mul_(scale)
        return factors.to(x.dtype)


def _draw(seed: Tensor, count: int) -> Tensor:
    """Draw uniform int16 numbers: -> (count,)."""
    words = np.random.SFC64(int(seed)).random_raw((count + 3) // 4)
    return torch.from_numpy(words.view(np.int16))[:count]


# Compiled code sees one operation. Each call has its own seed, so that no compiler merges calls.
_draw_compiled = torch.library.custom_op(
    "sbkit::draw_int16",
    lambda seed, count: _draw(seed, count).clone(),
    mutates_args=(),
    schema="(Tensor seed, SymInt count) -> Tensor",
)
_draw_compiled.register_fake(lambda seed, count: seed.new_empty(count, dtype=torch.int16))


class GlobalNorm(nn.Module):
    """Normalize every mel bin to zero mean and unit variance: (..., M) -> (..., M).

    The statistics are measured once, over the training set, and belong to the model.
    """

    mean: Tensor
    std: Tensor
    frames: Tensor

    def __init__(self, *, n_mels: PositiveCount = 80) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_mels))
        self.register_buffer("std", torch.ones(n_mels))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        return (features.to(self.mean.dtype) - self.mean) / self.std

    def set_statistics(self, sums: Tensor, frames: Tensor) -> None:
        """Set mean and deviation from the sums of features and of their squares (2, M) over frames.

        The deviation of a bin that never varies is set to one.
        """
        if int(frames) == 0:
            raise DataError(
                "The mean of the features cannot be measured: the training set has no clip of at "
                "least 25 ms. Check `data_folder` and `min_seconds`."
            )
        mean, mean_square = sums / frames
        std = (mean_square - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-5, std, torch.ones_like(std)))
        self.frames.copy_(frames)
