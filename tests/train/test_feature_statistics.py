"""The features of a training set are measured once, exactly."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.augment import SpeedGroup
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.data.batches.batch import Batch
from sbkit.models.asr import AsrModel
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.normalize import GlobalNorm
from sbkit.models.parts import FeatureExtractor
from sbkit.models.transformer import Transformer
from sbkit.text.vocabulary import Vocabulary
from sbkit.train.feature_statistics import measure_features

CPU = torch.device("cpu")
LENGTHS = [16_000, 399, 9000, 400, 12_345]


def model() -> tuple[nn.ModuleList, AsrModel, GlobalNorm]:
    """Make a small model and its asr_model."""
    norm = GlobalNorm(n_mels=23)
    parts: dict[str, nn.Module] = {
        "CNN": ConvFrontEnd(normalize=norm, n_mels=23, channels=8, d_model=8),
        "Transformer": Transformer(d_model=8, nhead=2, d_ffn=8, num_encoder_layers=1),
        "ctc_lin": nn.Linear(8, 5),
        "seq_lin": nn.Linear(8, 5),
    }
    owned = nn.ModuleList(parts.values())
    fbank = Fbank(n_mels=23)
    return (
        owned,
        AsrModel(model=owned, compute_features=fbank, vocabulary=Vocabulary(5), **parts),
        norm,
    )


def compute(model: AsrModel) -> FeatureExtractor:
    assert model.encoder.features is not None
    return model.encoder.features


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
    owned, asr_model, norm = model()
    measure_features(owned, compute(asr_model), batches(), CPU)
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
    owned, asr_model, norm = model()
    norm.frames.fill_(7)

    def never() -> Iterator[Batch]:
        raise AssertionError("nothing is to be read")
        yield

    measure_features(owned, compute(asr_model), never(), CPU)
    assert not norm.mean.any()


def test_an_empty_training_set_is_said() -> None:
    owned, asr_model, _ = model()
    with pytest.raises(SbkitError, match="at least one frame"):
        measure_features(owned, compute(asr_model), iter(()), CPU)
