"""The CNN ignores the padding."""

import math

import torch

from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import GlobalNorm


def test_conv_front_end_counts_frames_and_ignores_the_padding() -> None:
    torch.manual_seed(0)
    norm = GlobalNorm(n_mels=20)
    norm.mean.fill_(8)  # with these statistics, zeros of the padding become something else
    norm.std.fill_(3)
    part = ConvFrontEnd(normalize=norm, n_mels=20, channels=16, d_model=12)
    for frames in range(1, 51):
        features, lengths = 8 + torch.randn(1, frames, 20), torch.tensor([frames])
        expected, count = part(features, lengths)
        assert expected.shape == (1, int(count), 12) == (1, math.ceil(frames / 4), 12)
        padded = torch.cat([features, torch.full((1, 60 - frames, 20), -1e4)], dim=1)
        x = part(padded, lengths)[0][:, : count[0]]
        torch.testing.assert_close(x, expected, rtol=0.0, atol=1e-5)
    x, counts = part(torch.zeros(2, 9, 20), torch.tensor([9, 0]))
    assert counts.tolist() == [3, 0] and x.isfinite().all()
