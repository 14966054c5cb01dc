"""Masks of frames and channels in training."""

import pytest
import torch

from sbkit.models.pretrained.blocks import draw_spans, mask_spans


def test_spans_lie_anywhere_within_a_clip_and_cover_their_share() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([200, 57, 10, 9, 1, 0]).repeat(2000)
    masked = draw_spans(lengths, 200, 0.65, 10)
    counts = masked.sum(1)
    assert not masked[torch.arange(200) >= lengths.unsqueeze(1)].any()
    assert not counts[lengths < 10].any()
    assert not ((counts > 0) & (counts < 10)).any()
    # 13 spans at 13 of 191 starts: a frame is in none of them with (1 - 10 / 191)^13 = .50
    assert counts[lengths == 200].float().mean() / 200 == pytest.approx(0.49, abs=0.01)
    assert counts[lengths == 10].float().mean() / 10 == pytest.approx(0.65, abs=0.03)
    ends = masked[lengths == 57][:, [0, 56]].float().mean(0)
    assert ends.tolist() == pytest.approx([0.65 * 57 / 10 / 48] * 2, abs=0.02)


def test_masked_frames_are_replaced_and_follow_from_the_seed() -> None:
    x, lengths = torch.randn(4, 60, 96), torch.tensor([60, 30, 12, 5])
    vector = torch.full((96,), 7.0)

    def mask() -> torch.Tensor:
        torch.manual_seed(1)
        return mask_spans(x, lengths, frames=(0.65, 10), channels=(0.5, 64), vector=vector)

    y = mask()
    assert torch.equal(mask(), y)
    channels = (y == 0).all(1)  # (B, D): one span of 96 * .5 / 64 channels, or none
    assert {*channels.sum(1).tolist()} <= {0, 64} and channels.any()
    frames = (y == 7).any(2)  # (B, U)
    assert frames[:2].any(1).all() and not frames[3].any()  # the last is shorter than a span
    unmasked = ~(frames.unsqueeze(2) | channels.unsqueeze(1))
    assert torch.equal(y[unmasked], x[unmasked])
