"""One exact pass over the training set for what the model has to know before its first step."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from sbkit.data.batch import Batch
from sbkit.distributed.ranks import sum_over_ranks
from sbkit.models.normalize import FeatureSums, GlobalNorm


class ExtractsFeatures(Protocol):
    """A model of any task: an AsrModel, or an UtteranceClassifier."""

    def features(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features: (B, S), (B,) -> (B, T, M), (B,)."""


@torch.no_grad()
def measure_features(
    model: nn.Module, extractor: ExtractsFeatures, batches: Iterable[Batch], device: torch.device
) -> None:
    """Measure mean and deviation of the features for every GlobalNorm that has none yet.

    Each rank reads its share; the sums are in float64. A restored model is left as it is.
    """
    norms = [part for part in model.modules() if isinstance(part, GlobalNorm)]
    fresh = [norm for norm in norms if int(norm.frames) == 0]
    if not fresh:
        return
    sums = FeatureSums(n_mels=len(fresh[0].mean), device=device)
    moved = (batch.to(device) for batch in batches)
    sums.add(extractor.features(batch.audio.float(), batch.samples) for batch in moved)
    sum_over_ranks(sums.total)
    sum_over_ranks(sums.frames)
    for norm in fresh:
        norm.set_statistics(sums)
