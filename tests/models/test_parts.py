"""Modules of any origin work as parts, and their frames are counted as they are returned."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.lobes.features import Fbank as SpeechBrainFbank
from speechbrain.nnet import RNN
from torch import Tensor, nn

from sbkit.audio.augment import Augmentation
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import ConfigError
from sbkit.models.encoder import measure_subsampling
from sbkit.models.parts import (
    FeatureExtractor,
    FrontEnd,
    PartAdapter,
    Subsampling,
    TransformerPart,
    find_subsampling,
)
from tests.models.test_asr import sbkit_parts, speechbrain_cnn

MELS = 20


class PlainLayers(nn.Module):
    """Layers over (B, M, T), like a CNN in plain torch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features.transpose(1, 2)).transpose(1, 2)


def conv(stride: int = 2, kernel: int = 3, **options: Any) -> nn.Module:
    return nn.Conv1d(MELS, MELS, kernel, stride, **options)


# -- front-ends -------------------------------------------------------------------------------

FRONT_ENDS = {
    "unpadded": PlainLayers(conv(), conv()),
    "asymmetric": PlainLayers(conv(3, 4, padding=1), conv(2, 5)),
    "long kernel": PlainLayers(conv(4, 151)),
    "pooling that rounds up": PlainLayers(conv(1, padding=1), nn.AvgPool1d(4, ceil_mode=True)),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
@torch.no_grad()
def test_counted_frames_are_those_of_a_single_clip(name: str) -> None:
    part = FRONT_ENDS[name].eval()
    front_end = FrontEnd(part)
    for frames in (*range(160, 172), 400, 998):
        single = part(torch.randn(1, frames, MELS)).shape[1]
        x, lengths = front_end(torch.randn(2, 998, MELS), torch.tensor([998, frames]))
        assert lengths.tolist() == [x.shape[1], single], frames


def test_measuring_changes_neither_modes_nor_random_numbers() -> None:
    part = nn.Sequential(FRONT_ENDS["unpadded"], nn.Dropout(0.5)).train()
    torch.manual_seed(1)
    expected = part(torch.ones(1, 300, MELS))
    rng_state = torch.get_rng_state()
    torch.manual_seed(1)
    x, _ = FrontEnd(part)(torch.ones(1, 300, MELS), torch.tensor([300]))
    assert torch.equal(x, expected)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert all(module.training for module in part.modules())


# -- encoders ---------------------------------------------------------------------------------


class Doubling(nn.Module):
    """An encoder that checks the lengths that it gets."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.tolist() == [40, 17]
        return 2 * x


ENCODERS = {
    "lengths": Doubling(),
    "torch LSTM": nn.LSTM(MELS, 8, batch_first=True, bidirectional=True),
    "torch TransformerEncoder": nn.TransformerEncoder(
        nn.TransformerEncoderLayer(MELS, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    ),
    "SpeechBrain LSTM": RNN.LSTM(hidden_size=8, input_size=MELS, bidirectional=True),
}


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_plain_modules_are_encoders_that_ignore_the_padding(name: str) -> None:
    torch.manual_seed(0)
    part = ENCODERS[name].eval()
    encoder, x, lengths = TransformerPart(part), torch.randn(2, 40, MELS), torch.tensor([40, 17])
    states, _ = encoder.encode(x, lengths)
    assert states.shape[:2] == (2, 40)
    assert states.isfinite().all()
    if name != "torch LSTM":  # which does not know the lengths
        x[1, 17:] = 100.0
        torch.testing.assert_close(encoder.encode(x, lengths)[0][1, :17], states[1, :17])


@pytest.mark.parametrize(
    ("adapter", "part", "message"),
    [
        (FrontEnd, nn.Bilinear(MELS, MELS, MELS), r"its forward takes \(input1, input2\)"),
        (FrontEnd, nn.Flatten(), r"returns a tensor of shape \(2, 6000\)"),
        (
            FrontEnd,
            PlainLayers(nn.AdaptiveAvgPool1d(10)),
            "proportion .* 10 for 400 frames, 10 for",
        ),
        (
            TransformerPart,
            nn.MultiheadAttention(MELS, 2, batch_first=True),
            r"encode\(x, lengths\) .* takes \(query, key, value",
        ),
        (TransformerPart, nn.Sequential(nn.TransformerEncoderLayer(20, 2, 8)), "the batch first"),
        (TransformerPart, FRONT_ENDS["unpadded"], r"returns a tensor of shape \(2, 74, 20\) for"),
    ],
)
def test_unsuitable_parts_are_refused(
    adapter: type[PartAdapter], part: nn.Module, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter(part).run(torch.randn(2, 300, MELS), torch.tensor([300, 200]))


class SpeechBrainLike(nn.Module):
    """An encoder-decoder with SpeechBrain's signature, which declares its precision."""

    precision = "fp32"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MELS, MELS)

    def encode(self, src: Tensor, wav_len: Tensor, pad_idx: int = 0) -> Tensor:
        return self.linear(src)

    def forward(
        self, src: Tensor, tgt: Tensor, wav_len: Tensor, pad_idx: int = 0
    ) -> tuple[Tensor, Tensor]:
        return self.linear(src), self.linear(src)[:, : tgt.shape[1]]


def test_declared_precision_also_holds_where_speechbrain_encodes_and_decodes() -> None:
    part, x, lengths = TransformerPart(SpeechBrainLike()), torch.randn(2, 40, MELS), [40, 17]
    with torch.autocast("cpu", torch.bfloat16):
        states, _, decoded = part.encode_and_decode(
            x, torch.tensor(lengths), torch.zeros(2, 3, dtype=torch.int64)
        )
    assert states.dtype == decoded.dtype == torch.float32


# -- features ---------------------------------------------------------------------------------


class Windows(nn.Module):
    """Features that are plain windows, so that they show the scale of the audio."""

    def __init__(self, **declared: Any) -> None:
        super().__init__()
        vars(self).update(declared)

    def forward(self, audio: Tensor) -> Tensor:
        return audio.unfold(1, 400, 160)[..., :3]


def test_feature_extractor_gets_audio_in_its_scale() -> None:
    audio = torch.full((2, 16_000), 16_384, dtype=torch.int16)
    for part, level in ((Windows(), 16_384.0), (Windows(audio_scale=1.0), 0.5)):
        with torch.autocast("cpu", torch.bfloat16):
            features, lengths = FeatureExtractor(part)(audio, torch.tensor([16_000, 9_000]))
        assert (lengths.tolist(), features.dtype) == ([98, 54], torch.float32)
        assert (features[0] == level).all()
        assert not features[1, 54:].any()


def test_lengths_are_taken_from_a_list_or_a_numpy_attribute() -> None:
    class Returning(Windows):
        def forward(self, audio: Tensor) -> Any:
            return [super().forward(audio), torch.tensor([98, 7])]

    audio, lengths = torch.zeros(2, 16_000), torch.tensor([16_000, 9_000])
    declaring = Windows(samples_per_frame=np.int64(200))
    for module, expected in ((Returning(), [98, 7]), (declaring, [80, 45])):
        assert FeatureExtractor(module)(audio, lengths)[1].tolist() == expected


def test_augmentation_that_takes_fractions_is_refused() -> None:
    with pytest.raises(ConfigError, match="`wave_augment` is called with lengths in samples"):
        Augmentation(SimpleNamespace(wave_augment=Augmenter()), features=FeatureExtractor)


# -- subsampling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "cnn", "frame_ms"),
    [
        (Fbank(n_mels=40), sbkit_parts()["CNN"], 40),
        (Fbank(), speechbrain_cnn(2, 2, 2, n_mels=80, channels=2), 80),
        (SpeechBrainFbank(n_mels=80), speechbrain_cnn(2, 1, n_mels=80, channels=2), 20),
    ],
)
def test_measured_subsampling_counts_the_frames_of_the_parts(
    features: nn.Module, cnn: nn.Module, frame_ms: int
) -> None:
    subsampling = measure_subsampling(
        {"compute_features": features, "CNN": cnn, "Transformer": nn.Identity()}
    )
    assert subsampling.stride == 16 * frame_ms
    lengths = np.array([*range(9_000, 9_700, 37), 48_000, 123_457])
    front_end, compute = FrontEnd(cnn.eval()), FeatureExtractor(features)
    with torch.no_grad():
        for samples, expected in zip(lengths, subsampling.count(lengths), strict=True):
            audio = torch.zeros(1, int(samples))
            _, frames = front_end(*compute(audio, torch.tensor([samples])))
            assert int(frames) == expected
    if frame_ms == 40:
        assert subsampling.count(np.array([0, 399, 400])).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("stride", "offset"), [(1, 0), (7, 3), (33, -5), (50, 0), (90, 20)])
def test_find_subsampling_finds_any_constant_stride(stride: int, offset: int) -> None:
    def count(length: int) -> int:
        return (length + offset) // stride

    measured = find_subsampling(count, part="CNN", unit="samples", shortest=100)
    assert measured == Subsampling(stride, offset)
