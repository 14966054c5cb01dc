"""The features of a training set are measured once, exactly."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.augment import SpeedGroup
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.data.batch import Batch
from sbkit.models.layers import GlobalNorm
from sbkit.train.model_state import measure_features

CPU = torch.device("cpu")
LENGTHS = [16_000, 399, 9000, 400, 12_345]


def clips() -> list[Tensor]:
    torch.manual_seed(0)
    noise = [torch.randn(count) * 1000 * (n + 1) for n, count in enumerate(LENGTHS)]
    return [clip.to(torch.int16) for clip in noise]


def batch(audio: list[Tensor]) -> Batch:
    """Put clips side by side; their labels do not matter here."""
    zeros = torch.zeros(len(audio), dtype=torch.int64)
    return Batch(
        ids=[""] * len(audio),
        audio=pad_sequence(audio, batch_first=True),
        columns={},
        audio_lengths=torch.tensor([len(clip) for clip in audio]),
        weights=zeros + 1,
        speed_groups=(SpeedGroup(100, len(audio), max(map(len, audio))),),
        seconds=0.0,
    )


def batches() -> Iterator[Batch]:
    yield batch(clips()[:2])
    yield batch(clips()[2:])


def test_mean_and_deviation_are_numpys_over_every_frame() -> None:
    norm = GlobalNorm(n_mels=23)
    measure_features(norm, Fbank(n_mels=23), batches(), CPU)
    features = [
        Fbank(n_mels=23)(clip.unsqueeze(0), torch.tensor([len(clip)]))[0][0].double().numpy()
        for clip in clips()
        if len(clip) >= 400
    ]
    frames = np.concatenate(features)
    assert norm.frames == len(frames)
    np.testing.assert_allclose(norm.mean, frames.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.std, frames.std(0), rtol=1e-5)


def test_a_restored_model_is_left_as_it_is() -> None:
    norm = GlobalNorm(n_mels=23)
    norm.frames.fill_(7)

    def never() -> Iterator[Batch]:
        raise AssertionError("nothing is to be read")
        yield

    measure_features(norm, Fbank(n_mels=23), never(), CPU)
    assert not norm.mean.any()


def test_an_empty_training_set_is_said() -> None:
    with pytest.raises(SbkitError, match="no clip of at least 25 ms"):
        measure_features(GlobalNorm(n_mels=23), Fbank(n_mels=23), iter(()), CPU)
