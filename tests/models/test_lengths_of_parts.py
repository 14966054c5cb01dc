"""Whatever front-end or encoder a YAML names: the frames that are counted are those encoded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.nnet import RNN
from torch import Tensor, nn

from sbkit.audio.augment import Augmentation
from sbkit.base.errors import SbkitError
from sbkit.models.parts import FeatureExtractor, FrontEnd, TransformerPart

MELS = 20


class Plain(nn.Module):
    """Layers over (B, M, T), as a user writes a CNN of plain torch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        made: Tensor = self.layers(features.transpose(1, 2)).transpose(1, 2)
        return made


def conv(stride: int = 2, kernel: int = 3, **options: Any) -> nn.Module:
    return nn.Conv1d(MELS, MELS, kernel, stride, **options)


FRONT_ENDS = {
    "unpadded": Plain(conv(), conv()),
    "asymmetric": Plain(conv(3, 4, padding=1), conv(2, 5)),
    "one long kernel": Plain(conv(4, 151)),
    "pooling up": Plain(conv(1, padding=1), nn.AvgPool1d(4, ceil_mode=True)),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
@torch.no_grad()
def test_counted_frames_are_those_encoded_alone_and_in_a_batch(name: str) -> None:
    part = FRONT_ENDS[name].eval()
    front_end = FrontEnd(part)
    for frames in (*range(160, 172), 400, 998):
        alone = part(torch.randn(1, frames, MELS)).shape[1]
        x, counted = front_end(torch.randn(2, 998, MELS), torch.tensor([998, frames]))
        assert counted.tolist() == [x.shape[1], alone], frames


def test_measuring_changes_neither_modes_nor_random_numbers() -> None:
    part = nn.Sequential(FRONT_ENDS["unpadded"], nn.Dropout(0.5)).train()
    torch.manual_seed(1)
    x = part(torch.ones(1, 300, MELS))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    same, _ = FrontEnd(part)(torch.ones(1, 300, MELS), torch.tensor([300]))
    assert torch.equal(x, same)
    assert torch.equal(after, torch.get_rng_state())
    assert all(each.training for each in part.modules())


class Lens(nn.Module):
    def forward(self, features: Tensor, lens: Tensor) -> Any:
        return features, lens


class Mean(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.mean(1)


WRONG = [
    (Lens(), r"its forward takes \(features, lens\)"),
    (Mean(), r"returns a tensor of shape \(2, 20\)"),
    (Plain(nn.AdaptiveAvgPool1d(10)), "in proportion .* 10 for 400 frames, 10 for 800"),
]


@pytest.mark.parametrize(("part", "words"), WRONG)
def test_what_a_front_end_must_return_is_one_sentence(part: nn.Module, words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        FrontEnd(part)(torch.randn(2, 300, MELS), torch.tensor([300, 200]))


class Own(nn.Module):
    """An encoder that shows the lengths that it was given."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.tolist() == [40, 17]
        return 2 * x


ENCODERS = {
    "lengths": Own(),
    "torch LSTM": nn.LSTM(MELS, 8, batch_first=True, bidirectional=True),
    "torch TransformerEncoder": nn.TransformerEncoder(
        nn.TransformerEncoderLayer(MELS, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    ),
    "SpeechBrain LSTM": RNN.LSTM(hidden_size=8, input_size=MELS, bidirectional=True),
}


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_plain_module_is_an_encoder(name: str) -> None:
    torch.manual_seed(0)
    part = ENCODERS[name].eval()
    encoder, x, lengths = TransformerPart(part), torch.randn(2, 40, MELS), torch.tensor([40, 17])
    states, _ = encoder.encode(x, lengths)
    assert states.shape[:2] == (2, 40)
    assert states.isfinite().all()
    if name != "torch LSTM":  # which cannot know what is padding
        x[1, 17:] = 100.0
        torch.testing.assert_close(encoder.encode(x, lengths)[0][1, :17], states[1, :17])


class NoEncoder(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (NoEncoder(), r"must have encode\(x, lengths\) .* takes \(query, key, value\)"),
        (nn.Sequential(nn.TransformerEncoderLayer(MELS, 2, 8)), "must take the batch first"),
        (FRONT_ENDS["unpadded"], r"returns a tensor of shape \(2, 9, 20\) for"),
    ],
)
def test_what_is_no_encoder_is_refused(part: nn.Module, words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        TransformerPart(part).encode(torch.randn(2, 40, MELS), torch.tensor([40, 17]))


class Windows(nn.Module):
    """Features of plain windows, which show the scale of what they are given."""

    def __init__(self, **declared: float) -> None:
        super().__init__()
        vars(self).update(declared)

    def forward(self, audio: Tensor) -> Tensor:
        return audio.unfold(1, 400, 160)[..., :3]


def test_feature_extractors_are_given_their_scale() -> None:
    audio = torch.full((2, 16_000), 16_384, dtype=torch.int16)
    for part, level in ((Windows(), 16_384.0), (Windows(audio_scale=1.0), 0.5)):
        with torch.autocast("cpu", torch.bfloat16):
            features, lengths = FeatureExtractor(part)(audio, torch.tensor([16_000, 9_000]))
        assert (lengths.tolist(), features.dtype) == ([98, 54], torch.float32)
        assert (features[0] == level).all()
        assert not features[1, 54:].any()


def test_an_augmentation_that_takes_fractions_is_refused_by_its_key() -> None:
    with pytest.raises(SbkitError, match="`wave_augment` must take lengths in samples"):
        Augmentation(SimpleNamespace(wave_augment=Augmenter()), features=FeatureExtractor)
