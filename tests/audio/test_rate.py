"""Features are made for the rate of the audio, or refused."""

import pytest
from torch import nn

from sbkit.audio.fbank import Fbank
from sbkit.audio.rate import require_rate
from sbkit.base.errors import SbkitError


def test_features_of_another_rate_are_refused_however_deep_they_lie() -> None:
    features = nn.Sequential(nn.Identity(), Fbank(sample_rate=8000))
    require_rate(features, 8000)
    with pytest.raises(SbkitError, match="made for the audio's 16000 Hz, but its Fbank .* 8000 Hz"):
        require_rate(features, 16000)
