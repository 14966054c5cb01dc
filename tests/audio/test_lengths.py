"""Absolute lengths, and the fractions that SpeechBrain wants."""

import torch

from sbkit.audio.lengths import bucket_of, length_mask, pad_to_bucket, to_relative


def test_the_mask_is_true_inside() -> None:
    mask = length_mask(torch.tensor([0, 2, 3, 9]), 3, torch.device("cpu"))
    assert mask.tolist() == [[False] * 3, [True, True, False], [True] * 3, [True] * 3]


def test_every_length_survives_the_way_through_fractions() -> None:
    for longest in (1, 7, 997, 640_001):
        lengths = torch.arange(max(0, longest - 5000), longest + 1)
        assert torch.equal((to_relative(lengths, longest) * longest).round().long(), lengths)


def test_few_lengths_hold_all_others_with_little_padding() -> None:
    lengths = range(1, 4_000)
    buckets = [bucket_of(each) for each in lengths]
    assert all(0 <= held - each <= each / 32 for each, held in zip(lengths, buckets, strict=True))
    assert len({each for each in buckets if 1024 < each <= 2048}) == 32
    assert [bucket_of(each) for each in buckets] == buckets
    assert (bucket_of(0), bucket_of(1)) == (0, 1)


def test_an_accelerator_sees_few_lengths_and_the_cpu_all() -> None:
    x = torch.ones(2, 1001, 3)
    assert pad_to_bucket(x) is x
    assert pad_to_bucket(x.to("meta")).shape == (2, 1008, 3)
