"""An encoder is one part that takes audio, or three, all made for one sample rate."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile
import torch
from torch import Tensor, nn

from sbkit.audio.augment import AddNoise, Augmentation, Compose, SpecAugment
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import ConfigError
from sbkit.models.encoder import make_encoder, require_rate

AUDIO, LENGTHS = 16_384 * torch.ones(2, 1600), torch.tensor([1600, 900])


class WaveformEncoder(nn.Module):
    """Encodes frames of ten samples."""

    subsampling = 10

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 4)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(audio.unfold(1, 10, 10)), lengths // 10


def test_encoder_of_waveforms_has_no_features() -> None:
    encoder = make_encoder({"encoder": WaveformEncoder()})
    assert encoder(AUDIO, LENGTHS)[1].tolist() == [160, 90]
    hparams = SimpleNamespace(spec_augment=SpecAugment())
    with pytest.raises(ConfigError, match="`spec_augment` masks features, but"):
        Augmentation(hparams, features=encoder.features)


@pytest.mark.parametrize("keys", [(), ("CNN",), ("encoder", "CNN")])
def test_encoder_needs_one_part_or_three(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="either `encoder`, or `compute_fe"):
        make_encoder({key: WaveformEncoder() for key in keys})


def test_nested_parts_for_another_sample_rate_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", [0.1] * 99, 16_000)
    features = nn.Sequential(nn.Identity(), Fbank(sample_rate=8000))
    noise = Compose(parts=[AddNoise(folder=str(tmp_path), sample_rate=8000)])
    for name, part in (("compute_features", features), ("wave_augment", noise)):
        require_rate({name: part}, 8000)
        with pytest.raises(ConfigError, match=f"has 16000 Hz, .* in `{name}` is made for 8000 Hz"):
            require_rate({name: part}, 16_000)
