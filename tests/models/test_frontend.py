"""The CNN knows where an utterance ends."""

import math

import torch

from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import GlobalNorm


def front_end() -> ConvFrontEnd:
    """Make one with statistics that turn padding of zeros into something else."""
    torch.manual_seed(0)
    norm = GlobalNorm(n_mels=20)
    norm.mean.fill_(8)
    norm.std.fill_(3)
    return ConvFrontEnd(normalize=norm, n_mels=20, channels=16, d_model=12)


def test_frames_are_counted_and_padding_is_not_heard() -> None:
    part = front_end()
    for frames in range(1, 51):
        features, lengths = 8 + torch.randn(1, frames, 20), torch.tensor([frames])
        alone, counted = part(features, lengths)
        assert alone.shape == (1, int(counted), 12) == (1, math.ceil(frames / 4), 12)
        padded = torch.cat([features, torch.full((1, 60 - frames, 20), -1e4)], dim=1)
        together, _ = part(padded, lengths)
        torch.testing.assert_close(together[:, : counted[0]], alone, rtol=0.0, atol=1e-5)
    x, counted = part(torch.zeros(2, 9, 20), torch.tensor([9, 0]))
    assert counted.tolist() == [3, 0] and x.isfinite().all()
