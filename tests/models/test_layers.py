"""Convolutions equal PyTorch's and ignore the padding; dropout and norm have their statistics."""

import math

import pytest
import torch
from torch import nn

from sbkit.base.errors import ConfigError
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import Dropout, FrameConv, GlobalNorm, StridedConv

# -- convolutions -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("in_channels", "out_channels", "kernel", "stride", "groups"),
    [(80, 32, 5, 2, 1), (32, 32, 15, 1, 32)],
)
def test_frame_conv_equals_conv1d(
    in_channels: int, out_channels: int, kernel: int, stride: int, groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    options = {"stride": stride, "padding": kernel // 2, "groups": groups, "dtype": dtype}
    conv = FrameConv(in_channels, out_channels, kernel, **options)
    plain = nn.Conv1d(in_channels, out_channels, kernel, **options)
    plain.load_state_dict(conv.state_dict())
    for utterances, frames in ((2, 34), (1, 34), (3, 1)):
        x = torch.randn(utterances, frames, in_channels, dtype=dtype, requires_grad=True)
        ours, theirs = (
            (y, *torch.autograd.grad(y.square().sum(), x))
            for y in (conv(x), plain(x.transpose(1, 2)).transpose(1, 2))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(60)
def test_frame_conv_returns_under_autocast_to_bfloat16() -> None:
    layer = FrameConv(16, 16, 15, padding=7, groups=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 34, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "bias"),
    [(1, 10, 5, False), (4, 3, 2, True), (4, 2, 2, False), (4, 7, 3, True), (4, 2, 3, False)],
)
def test_strided_conv_equals_conv1d(channels: int, kernel: int, stride: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = StridedConv(channels, 6, kernel, stride, bias=bias)
    x = torch.randn(2, 41, channels, requires_grad=True)
    ours, theirs = conv(x), nn.Conv1d.forward(conv, x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    inputs, loss = (x, *conv.parameters()), torch.randn_like(ours)
    gradients = (torch.autograd.grad((y * loss).sum(), inputs) for y in (ours, theirs))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("subsampling", [4, 8])
def test_conv_front_end_counts_frames(subsampling: int) -> None:
    sizes = {"n_mels": 20, "channels": 16, "d_model": 12, "subsampling": subsampling}
    part = ConvFrontEnd(normalize=GlobalNorm(n_mels=20), **sizes)
    for frames in range(1, 51):
        x, counts = part(torch.randn(2, frames, 20), torch.tensor([frames, 0]))
        expected = math.ceil(frames / subsampling)
        assert (x.shape, counts.tolist()) == ((2, expected, 12), [expected, 0])
        assert x.isfinite().all()
    with pytest.raises(ConfigError, match="`subsampling` must be 4 or 8, but is 6"):
        ConvFrontEnd(normalize=part.normalize, **{**sizes, "subsampling": 6})


# -- dropout ----------------------------------------------------------------------------------

COUNT = 400_001  # not a multiple of four


@pytest.mark.parametrize("p", [0.01, 0.1, 0.15, 0.5, 0.9, 0.999])
def test_dropout_drops_its_share_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    dropped = Dropout(p)(torch.ones(COUNT))
    deviation = math.sqrt(p * (1 - p) / COUNT)
    share = float((dropped == 0).double().mean())
    assert abs(share - p) < 5 * deviation + 1 / 65536
    assert float(dropped.double().mean()) == pytest.approx(1.0, abs=6 * deviation / (1 - p))
    survivors = dropped[dropped != 0]
    expected = torch.full_like(survivors, 1 / (1 - p))
    torch.testing.assert_close(survivors, expected, rtol=0.02, atol=0)


def test_dropout_decides_independently_for_neighbors() -> None:
    torch.manual_seed(0)
    survives = (Dropout(0.5)(torch.ones(COUNT - 1)) != 0).view(-1, 4).int()  # one number each
    patterns = (survives * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    expected = (COUNT - 1) / 4 / 16
    assert int((patterns - expected).abs().max()) < 5 * math.sqrt(expected)


def test_dropout_masks_the_gradient_and_is_the_identity_when_off() -> None:
    x = torch.randn(1000, requires_grad=True)
    dropped = Dropout(0.3)(x)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(grad * x, dropped)
    assert 0 < int((grad == 0).sum()) < 1000
    assert Dropout(0.0)(x) is x and Dropout(0.9).eval()(x) is x
    assert not Dropout(1.0)(torch.ones(COUNT)).any()


# -- feature norm -----------------------------------------------------------------------------


def test_global_norm_zeroes_a_constant_bin() -> None:
    torch.manual_seed(0)
    features = 8 + 4 * torch.randn(302, 5)  # far from zero, like log-mels
    features[:, 3] = -15.9424
    frames, norm = features.double(), GlobalNorm(n_mels=5)
    sums = torch.stack([frames.sum(0), frames.square().sum(0)])
    norm.set_statistics(sums, torch.tensor(len(frames)))
    normalized = norm(features)
    torch.testing.assert_close(normalized[:, 3], torch.zeros(302), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(normalized[:, 0].std(correction=0), torch.tensor(1.0))
