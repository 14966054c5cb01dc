"""A convolution over frames is PyTorch's, with the channels last."""

import pytest
import torch
from torch import nn

from sbkit.models.layers import FrameConv, StridedConv

LAYERS = [(80, 32, 5, 2, 1), (32, 32, 15, 1, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("takes", "gives", "kernel", "stride", "groups"), LAYERS)
def test_it_is_conv1d(
    takes: int, gives: int, kernel: int, stride: int, groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    how = {"stride": stride, "padding": kernel // 2, "groups": groups, "dtype": dtype}
    ours, plain = FrameConv(takes, gives, kernel, **how), nn.Conv1d(takes, gives, kernel, **how)
    plain.load_state_dict(ours.state_dict())
    for utterances, frames in ((2, 34), (1, 34), (3, 1)):
        x = torch.randn(utterances, frames, takes, dtype=dtype, requires_grad=True)
        answers = []
        for y in (ours(x), plain(x.transpose(1, 2)).transpose(1, 2)):
            gradients = torch.autograd.grad(y.square().sum(), x)
            answers.append((y, *gradients))
        torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(60)
def test_autocast_to_bfloat16_returns() -> None:
    layer = FrameConv(16, 16, 15, padding=7, groups=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 34, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "bias"),
    [(1, 10, 5, False), (4, 3, 2, True), (4, 2, 2, False), (4, 7, 3, True), (4, 2, 3, False)],
)
def test_a_strided_one_by_matrices_computes_what_pytorch_does(
    channels: int, kernel: int, stride: int, bias: bool
) -> None:
    torch.manual_seed(0)
    conv = StridedConv(channels, 6, kernel, stride, bias=bias)
    x = torch.randn(2, 41, channels, requires_grad=True)
    ours, theirs = conv(x), nn.Conv1d.forward(conv, x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    weights, loss = (x, *conv.parameters()), torch.randn_like(ours)
    both = (torch.autograd.grad((each * loss).sum(), weights) for each in (ours, theirs))
    torch.testing.assert_close(*both)
