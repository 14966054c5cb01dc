"""How many frames there are is what the parts themselves say, and what CTC finds."""

import numpy as np
import pytest
import torch
from speechbrain.lobes.features import Fbank as SpeechBrainFbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from torch import nn

from sbkit.audio.fbank import Fbank
from sbkit.models.encoder import measure_subsampling
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import GlobalNorm
from sbkit.models.parts import FeatureExtractor, FrontEnd
from sbkit.models.subsampling import Subsampling, find_subsampling


def ours() -> nn.Module:
    return ConvFrontEnd(normalize=GlobalNorm(n_mels=80), n_mels=80, channels=4, d_model=4)


def lobes(*strides: int) -> nn.Module:
    return ConvolutionFrontEnd(
        input_shape=(1, 100, 80),
        num_blocks=len(strides),
        num_layers_per_block=1,
        out_channels=[2] * len(strides),
        kernel_sizes=[3] * len(strides),
        strides=list(strides),
        residuals=[False] * len(strides),
    )


def measure(features: nn.Module, cnn: nn.Module) -> Subsampling:
    parts = {"compute_features": features, "CNN": cnn, "Transformer": nn.Identity()}
    return measure_subsampling(parts)


@pytest.mark.parametrize(
    ("features", "cnn", "milliseconds"),
    [
        (Fbank(), ours(), 40),
        (Fbank(), lobes(2, 2, 2), 80),
        (SpeechBrainFbank(n_mels=80), lobes(2, 1), 20),
    ],
)
def test_frames_are_those_that_the_parts_give(
    features: nn.Module, cnn: nn.Module, milliseconds: int
) -> None:
    found = measure(features, cnn)
    assert found.stride == 16 * milliseconds
    lengths = np.array([*range(9_000, 9_700, 37), 48_000, 123_457])
    subsample, compute = FrontEnd(cnn.eval()), FeatureExtractor(features)
    with torch.no_grad():
        for samples, expected in zip(lengths, found.count(lengths), strict=True):
            audio = torch.zeros(1, int(samples))
            _, frames = subsample(*compute(audio, torch.tensor([samples])))
            assert int(frames) == expected


@pytest.mark.parametrize(("stride", "offset"), [(1, 0), (7, 3), (33, -5), (50, 0), (90, 20)])
def test_any_constant_stride_is_found(stride: int, offset: int) -> None:
    def count(length: int) -> int:
        return (length + offset) // stride

    found = find_subsampling(count, part="CNN", unit="samples", shortest=100)
    assert found == Subsampling(stride, offset)


def test_nothing_is_left_of_almost_no_audio() -> None:
    assert measure(Fbank(), ours()).count(np.array([0, 399, 400])).tolist() == [0, 0, 1]
