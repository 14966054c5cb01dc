"""Whether each value of the features depends on the audio."""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from sbkit.audio.rate import require_rate
from sbkit.base.text import listed, plural
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.models.parts import FeatureExtractor

LOUDNESS = 1000.0  # of the noise, in the scale of int16
SECONDS = 2


def check_features(planned: PlannedRun) -> Iterator[Finding]:
    """Find parts for another sample rate, and values that are the same in every frame of noise.

    A mel filter that is narrower than the steps of the spectrum holds none of them: 160 of 400 at
    16 kHz do.
    """
    part = planned.hparams.get(FeatureExtractor.NAME)
    rate = planned.knobs.get("sample_rate")
    if not isinstance(part, nn.Module) or rate is None:
        return
    require_rate(planned.hparams, rate)
    features = _of_noise(part, rate)  # (T, M)
    still = (features.amax(0) == features.amin(0)).nonzero().flatten().tolist()
    if still:
        key = "n_mels" if "n_mels" in planned.document.root else FeatureExtractor.NAME
        yield planned.finding(
            "features",
            key,
            declared=f"each of the {plural(features.shape[1], 'value')} of a frame must depend on "
            "the audio",
            effect=f"{len(still)} of them ({listed(still)}) are the same in every frame of white "
            "noise, as those of mel filters that are narrower than the steps of the spectrum",
            fix="Lower the number of mel bins; 80 are usual at 16 kHz.",
            stops=False,
        )


@torch.no_grad()
def _of_noise(part: nn.Module, sample_rate: int) -> Tensor:
    """Compute the features of white noise: -> (T, M)."""
    samples = SECONDS * sample_rate
    noise = LOUDNESS * torch.randn(1, samples, generator=torch.Generator().manual_seed(0))
    extractor = FeatureExtractor(deepcopy(part).cpu().eval())
    features, lengths = extractor(noise, torch.tensor([samples]))
    return features[0, : int(lengths[0])]
