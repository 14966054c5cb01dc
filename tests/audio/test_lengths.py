"""SpeechBrain's relative lengths, and buckets."""

import torch

from sbkit.audio.lengths import bucket_of, pad_to_bucket, to_relative


def test_lengths_survive_conversion_to_fractions() -> None:
    for longest in (1, 7, 997, 640_001):
        lengths = torch.arange(max(0, longest - 5000), longest + 1)
        assert torch.equal((to_relative(lengths, longest) * longest).round().long(), lengths)


def test_buckets_are_few_and_add_little_padding() -> None:
    lengths = range(1, 4_000)
    buckets = [bucket_of(length) for length in lengths]
    assert all(0 <= b - length <= length / 32 for length, b in zip(lengths, buckets, strict=True))
    assert len({bucket for bucket in buckets if 1024 < bucket <= 2048}) == 32
    assert [bucket_of(bucket) for bucket in buckets] == buckets
    assert (bucket_of(0), bucket_of(1)) == (0, 1)


def test_pad_to_bucket_pads_on_accelerators_only() -> None:
    x = torch.ones(2, 1001, 3)
    assert pad_to_bucket(x) is x
    assert pad_to_bucket(x.to("meta")).shape == (2, 1008, 3)
