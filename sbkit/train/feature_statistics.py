"""One exact pass over the training set for what the model has to know before its first step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.data.batch import Batch
from sbkit.distributed.ranks import sum_over_ranks
from sbkit.models.normalize import FeatureSums, GlobalNorm

Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def measure_features(
    model: nn.Module, compute: Compute, batches: Iterable[Batch], device: torch.device
) -> None:
    """Set the mean and deviation of every GlobalNorm that has none yet.

    ``compute`` makes features of float audio (B, S) and its lengths (B,): `AsrModel.features` say.

    Each rank walks its share; the sums are in float64. A restored model is left as it is.
    """
    norms = [part for part in model.modules() if isinstance(part, GlobalNorm)]
    fresh = [norm for norm in norms if int(norm.frames) == 0]
    if not fresh:
        return
    sums = FeatureSums(n_mels=len(fresh[0].mean), device=device)
    moved = (batch.to(device) for batch in batches)
    sums.add(compute(batch.audio.float(), batch.audio_lengths) for batch in moved)
    sum_over_ranks(sums.total)
    sum_over_ranks(sums.frames)
    for norm in fresh:
        norm.set_statistics(sums)


def measure_on_start(brain: Any, compute: Compute) -> None:
    """Measure the features of the training set of a Brain that has its run's loaders."""
    if brain.loaders is not None:
        batches = brain.pinging(brain.loaders.measure, "measure")
        measure_features(brain.modules, compute, batches, brain.device)
