"""Parts that take audio are made for its rate, or refused."""

from pathlib import Path

import pytest
import soundfile
from torch import nn

from sbkit.audio.augment import Compose
from sbkit.audio.fbank import Fbank
from sbkit.audio.noise import AddNoise
from sbkit.audio.rate import require_rate
from sbkit.base.errors import SbkitError


def test_features_of_another_rate_are_refused_however_deep_they_lie() -> None:
    parts = {"compute_features": nn.Sequential(nn.Identity(), Fbank(sample_rate=8000))}
    require_rate(parts, 8000)
    with pytest.raises(SbkitError, match="made for the audio's 16000 Hz, but its Fbank .* 8000 Hz"):
        require_rate(parts, 16000)


def test_noise_of_another_rate_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", [0.1] * 99, 16_000)
    parts = {"wave_augment": Compose(parts=[AddNoise(folder=str(tmp_path))])}
    require_rate(parts, 16000)
    with pytest.raises(SbkitError, match="`wave_augment` must be .* 8000 Hz, but its AddNoise is"):
        require_rate(parts, 8000)
