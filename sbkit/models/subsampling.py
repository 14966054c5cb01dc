"""How many frames a front-end leaves of an utterance, found out by asking it.

A strided layer makes floor((n + a) / s) frames of n, and so does a stack of such layers: two
numbers say it all, whoever wrote the layers.
"""

from bisect import bisect_left
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.models.asr import front_end, run_features

Counts = npt.NDArray[np.int64]

SHORT = seconds_to_samples(1.0)  # long enough for any kernel and its mirrored padding
WIDEST = seconds_to_samples(0.64)  # a frame
CONTROLS = tuple(map(seconds_to_samples, (2.4, 3.1013, 9.87)))


@dataclass(frozen=True)
class Subsampling:
    """A frame every ``stride`` samples, the first after ``stride - offset``."""

    stride: int
    offset: int

    def frames(self, samples: Counts) -> Counts:
        """Count the frames of lengths of audio."""
        return np.maximum(0, (samples + self.offset) // self.stride)

    def halved(self) -> "Subsampling":
        """Give that of a front-end which strides half as far."""
        return Subsampling(self.stride // 2, self.offset // 2)


def measure_subsampling(compute_features: nn.Module, CNN: nn.Module) -> Subsampling:
    """Run silence of some thirty lengths through features and CNN, and see when a frame is added.

    Raises SbkitError when the CNN does not take the features, or keeps no constant stride.
    """
    count = _counter(deepcopy(compute_features).eval(), deepcopy(CNN).eval())
    lengths = range(SHORT, SHORT + 2 * WIDEST)
    first = count(SHORT)
    one, two = (SHORT + bisect_left(lengths, first + more, key=count) for more in (1, 2))
    stride = max(two - one, 1)
    found = Subsampling(stride, (first + 1) * stride - one)
    for samples in CONTROLS:
        expected = int(found.frames(np.array(samples)))
        if count(samples) != expected:
            raise SbkitError(
                "`CNN` must stride evenly through the audio, so that it is known how many frames "
                f"an utterance has, but gives {count(samples)} frames of "
                f"{samples_to_seconds(samples):g} s where {expected} were expected. Give its "
                "layers constant strides."
            )
    return found


def _counter(compute_features: nn.Module, CNN: nn.Module) -> Callable[[int], int]:
    subsample = front_end(CNN)

    @torch.no_grad()
    def count(samples: int) -> int:
        silence = torch.zeros(1, samples)
        features, frames = run_features(compute_features, silence, torch.tensor([samples]))
        try:
            return int(subsample(features, frames)[1])
        except RuntimeError as error:
            raise SbkitError(
                f"`CNN` must take features of {features.shape[-1]} values a frame, but fails "
                f"({error}). Give it and `compute_features` the same number of mel bins."
            ) from error

    return count
