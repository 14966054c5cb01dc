"""One pass over the data gives the statistics of all of it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.models.layers import GlobalNorm


def utterances() -> list[Tensor]:
    """Make features far from zero, as log-mels are, one bin of which never varies."""
    torch.manual_seed(0)
    clips = [8 + 4 * torch.randn(count, 5) for count in (1, 30, 7, 200, 0, 64)]
    for clip in clips:
        clip[:, 3] = -15.9424
    return clips


def measured() -> GlobalNorm:
    """Measure all utterances."""
    frames = torch.cat(utterances()).double()
    norm = GlobalNorm(n_mels=5)
    norm.set_statistics(
        torch.stack([frames.sum(0), frames.square().sum(0)]), torch.tensor(len(frames))
    )
    return norm


def test_the_statistics_are_numpys_over_all_frames() -> None:
    """A bin that never varies becomes zero."""
    frames = np.concatenate([clip.numpy() for clip in utterances()]).astype(np.float64)
    norm = measured()
    assert norm.frames == len(frames) == 302
    np.testing.assert_allclose(norm.mean, frames.mean(0), rtol=1e-6)
    varies = [0, 1, 2, 4]
    np.testing.assert_allclose(norm.std[varies], frames.std(0)[varies], rtol=1e-6)
    normalized = norm(torch.cat(utterances()))
    torch.testing.assert_close(normalized[:, 3], torch.zeros(302), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(normalized[:, 0].std(correction=0), torch.tensor(1.0))


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(SbkitError, match="no clip of at least 25 ms"):
        GlobalNorm(n_mels=5).set_statistics(torch.zeros(2, 5), torch.tensor(0))
