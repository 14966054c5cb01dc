"""The CNN knows where an utterance ends."""

import math

import pytest
import torch

from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.normalize import GlobalNorm


def front_end() -> ConvFrontEnd:
    """Make one with statistics that turn padding of zeros into something else."""
    torch.manual_seed(0)
    norm = GlobalNorm(n_mels=20)
    norm.mean.fill_(8)
    norm.std.fill_(3)
    return ConvFrontEnd(normalize=norm, n_mels=20, channels=16, d_model=12)


@pytest.mark.parametrize("frames", range(1, 51))
def test_the_counted_frames_are_those_that_come_out(frames: int) -> None:
    x, lengths = front_end()(torch.randn(1, frames, 20), torch.tensor([frames]))
    assert x.shape == (1, int(lengths), 12) == (1, math.ceil(frames / 4), 12)


@pytest.mark.parametrize("padding", [0.0, 1.0, -1e4])
def test_what_lies_past_the_end_is_not_heard(padding: float) -> None:
    part = front_end()
    for frames in range(1, 51):
        features = 8 + torch.randn(1, frames, 20)
        alone, _ = part(features, torch.tensor([frames]))
        padded = torch.cat([features, torch.full((1, 60 - frames, 20), padding)], dim=1)
        together, lengths = part(padded, torch.tensor([frames]))
        torch.testing.assert_close(together[:, : lengths[0]], alone, rtol=0.0, atol=1e-5)


def test_an_utterance_without_a_frame_passes() -> None:
    x, lengths = front_end()(torch.zeros(2, 9, 20), torch.tensor([9, 0]))
    assert lengths.tolist() == [3, 0]
    assert x.isfinite().all()
