"""A part takes x and lengths, returns y and lengths, and keeps what its `subsampling` declares."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.dataio.dataio import length_to_mask
from speechbrain.lobes.features import Fbank as SpeechBrainFbank
from speechbrain.nnet.RNN import LSTM
from torch import Tensor, nn

from sbkit.audio.augment import Augmentation
from sbkit.audio.fbank import Fbank
from sbkit.audio.lengths import Subsampling
from sbkit.base.errors import ConfigError
from sbkit.models.encoder import make_encoder
from sbkit.models.encoder_parts import EncoderPart, FeatureExtractor
from sbkit.models.speechbrain_parts import SpeechBrainLayers
from tests.models.test_asr import sbkit_parts, speechbrain_cnn

MELS = 20


class Halving(nn.Module):
    """Two unpadded convolutions over (B, M, T), like a CNN in plain torch."""

    def __init__(self, subsampling: Subsampling | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv1d(MELS, MELS, 3, 2) for _ in range(2))
        halving = Subsampling.of_windows(size=3, shift=2)
        self.subsampling = subsampling or halving.then(halving)

    def forward(self, features: Tensor, lengths: Tensor) -> Any:
        x = self.conv2(self.conv1(features.transpose(1, 2))).transpose(1, 2)
        return x, self.subsampling.count(lengths)


class Strided(nn.Module):
    """Has a layer that happens to be named `subsampling`."""

    def __init__(self) -> None:
        super().__init__()
        self.subsampling = nn.Conv1d(MELS, MELS, 3, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.subsampling(x.transpose(1, 2)).transpose(1, 2), (lengths - 1) // 2


class Lengthless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Masking(nn.Module):
    """Masks the padding as SpeechBrain's recipes do, which whole numbers would make a no-op."""

    def forward(self, x: Tensor, wav_lens: Tensor) -> tuple[Tensor, Tensor]:
        mask = length_to_mask(wav_lens * x.shape[1], x.shape[1]).unsqueeze(-1)
        return x * mask, wav_lens


class Returning(nn.Module):
    def __init__(self, *output: object) -> None:
        super().__init__()
        self.output = output[0] if len(output) == 1 else output

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.output


def test_layers_of_torch_take_frames_alone_and_keep_them() -> None:
    x, lengths = torch.randn(2, 9, MELS), torch.tensor([9, 4])
    layer = nn.Sequential(nn.LayerNorm(MELS), nn.Linear(MELS, 7))
    torch.testing.assert_close(EncoderPart("Transformer", layer)(x, lengths), (layer(x), lengths))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.LSTM(MELS, 8, batch_first=True), "is LSTM of torch.nn. .* Wrap it in a class"),
        (Returning(torch.zeros(2, 300, 1)), "but returns an object of type Tensor"),
        (Returning(torch.zeros(2, 9), torch.ones(2)), r"shape \(2, 9\) and \(2,\) for \(2, 300"),
        (Halving(Subsampling(8)), r"returns 74 frames of 300, .* but declares 37 and \[37, 25\]"),
        (Returning(torch.zeros(2, 300, 1), torch.tensor([300, 150])), r"300 and \[300, 200\]"),
        (Strided(), "`subsampling` of Strided in `CNN` .* is a Conv1d. Give it another name"),
        (Lengthless(), r"`CNN` is called with \(x, lengths=lengths\), .* an unexpected keyword"),
        (LSTM(hidden_size=8, input_size=MELS), "of SpeechBrain. .*SpeechBrainLayers"),
        (Masking(), "whole numbers, but Masking.forward.. got an unexpected keyword argument"),
    ],
)
def test_unsuitable_parts_are_refused(part: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderPart("CNN", part)(torch.randn(2, 300, MELS), torch.tensor([300, 200]))


def test_augmentation_of_speechbrain_is_refused() -> None:
    with pytest.raises(ConfigError, match="`wave_augment` is called with lengths in samples"):
        Augmentation(SimpleNamespace(wave_augment=Augmenter()), features=FeatureExtractor)


class Windows(nn.Module):
    """Features that are plain windows, which overlap the padding."""

    subsampling = Subsampling.of_windows(400, 160)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return audio.unfold(1, 400, 160)[..., :3], self.subsampling.count(lengths)


def test_features_are_float32_and_zero_in_the_padding() -> None:
    audio = torch.full((2, 16_000), 16_384, dtype=torch.int16)
    with torch.autocast("cpu", torch.bfloat16):
        features, lengths = FeatureExtractor(Windows())(audio, torch.tensor([16_000, 9_000]))
    assert (lengths.tolist(), features.dtype) == ([98, 54], torch.float32)
    assert (features[0] == 16_384).all() and not features[1, 54:].any()


@pytest.mark.parametrize(
    ("features", "cnn", "frame_ms"),
    [
        (Fbank(n_mels=40), sbkit_parts()["CNN"], 40),
        (
            Fbank(),
            SpeechBrainLayers(subsampling=8, convs=speechbrain_cnn(2, 2, 2, n_mels=80, channels=2)),
            80,
        ),
        (
            SpeechBrainLayers(subsampling=160, offset=160, fbank=SpeechBrainFbank(n_mels=80)),
            SpeechBrainLayers(subsampling=2, convs=speechbrain_cnn(2, 1, n_mels=80, channels=2)),
            20,
        ),
    ],
)
def test_declared_subsampling_counts_the_frames_of_the_parts(
    features: nn.Module, cnn: nn.Module, frame_ms: int
) -> None:
    parts = {"compute_features": features, "CNN": cnn, "Transformer": nn.Identity()}
    subsampling = make_encoder(parts).subsampling
    assert subsampling.stride == 16 * frame_ms
    lengths = np.array([*range(9_000, 9_700, 37), 48_000, 123_457])
    front_end, compute = EncoderPart("CNN", cnn.eval()), FeatureExtractor(features)
    with torch.no_grad():
        for samples, expected in zip(lengths, subsampling.count(lengths), strict=True):
            audio = torch.zeros(1, int(samples))
            x, frames = front_end(*compute(audio, torch.tensor([samples])))
            assert int(frames) == x.shape[1] == expected
    if frame_ms == 40:
        assert subsampling.count(np.array([0, 399, 400])).tolist() == [0, 0, 1]


def test_frames_are_counted_after_the_last_part_that_leaves_some_out() -> None:
    parts = {"compute_features": Fbank(n_mels=MELS), "CNN": nn.Identity(), "Transformer": Halving()}
    encoder = make_encoder(parts)
    states, lengths = encoder(torch.zeros(1, 16_000), torch.tensor([16_000]))
    assert int(lengths) == states.shape[1] == encoder.subsampling.count(np.array(16_000)) == 23
