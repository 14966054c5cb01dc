"""Absolute lengths, and the fractions that SpeechBrain wants."""

import torch

from sbkit.audio.lengths import length_mask, to_relative


def test_the_mask_is_true_inside() -> None:
    mask = length_mask(torch.tensor([0, 2, 3, 9]), 3, torch.device("cpu"))
    assert mask.tolist() == [[False] * 3, [True, True, False], [True] * 3, [True] * 3]


def test_every_length_survives_the_way_through_fractions() -> None:
    for longest in (1, 7, 997, 640_001):
        lengths = torch.arange(max(0, longest - 5000), longest + 1)
        assert torch.equal((to_relative(lengths, longest) * longest).round().long(), lengths)
