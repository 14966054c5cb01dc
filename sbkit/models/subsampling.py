"""How many frames a front-end leaves of an utterance, found out by asking it.

A strided layer makes floor((n + a) / s) frames of n, and so does a stack of such layers: two
numbers say it all, whoever wrote the layers.
"""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.feature_extractor import FeatureExtractor
from sbkit.models.frontend_adapter import FrontEnd
from sbkit.models.striding import measure_striding

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Subsampling:
    """A frame every ``stride`` samples, the first after ``stride - offset``."""

    stride: int
    offset: int

    def frames(self, samples: Counts) -> Counts:
        """Count the frames of lengths of audio."""
        return np.maximum(0, (samples + self.offset) // self.stride)

    def halved(self) -> "Subsampling":
        """Return that of a front-end which strides half as far."""
        return Subsampling(self.stride // 2, self.offset // 2)


def measure_subsampling(
    compute_features: nn.Module, CNN: nn.Module, sample_rate: int = SAMPLE_RATE
) -> Subsampling:
    """Run silence of some twenty lengths through features and CNN, and see when a frame is added.

    Raises SbkitError when the CNN does not take the features, or keeps no constant stride.
    """
    features = FeatureExtractor(deepcopy(compute_features).cpu().eval())
    front_end = FrontEnd(deepcopy(CNN).cpu().eval())

    @torch.no_grad()
    def count(samples: int) -> int:
        computed, lengths = features(torch.zeros(1, samples), torch.tensor([samples]))
        try:
            return int(front_end(computed, lengths)[1])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SbkitError(
                f"`CNN` must take features of {computed.shape[-1]} values a frame, but fails "
                f"({type(error).__name__}: {error}). Give it and `compute_features` the same "
                "number of mel bins, or correct it."
            ) from error

    found = measure_striding(count, part="CNN", unit="samples", shortest=sample_rate)
    return Subsampling(found.stride, found.offset)
