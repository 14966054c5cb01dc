"""One exact pass over the training set for what the model has to know before its first step."""

from collections.abc import Iterable

import torch
from torch import nn

from sbkit.data.batch import Batch
from sbkit.distributed.ranks import sum_over_ranks
from sbkit.models.asr import AsrModel
from sbkit.models.normalize import FeatureSums, GlobalNorm


@torch.no_grad()
def measure_features(
    model: nn.Module, asr_model: AsrModel, batches: Iterable[Batch], device: torch.device
) -> None:
    """Give every GlobalNorm that has no statistics yet the mean and deviation of its features.

    Each rank walks its share; the sums are in float64. A restored model is left as it is.
    """
    norms = [part for part in model.modules() if isinstance(part, GlobalNorm)]
    fresh = [norm for norm in norms if int(norm.frames) == 0]
    if not fresh:
        return
    sums = FeatureSums(n_mels=len(fresh[0].mean), device=device)
    moved = (batch.to(device) for batch in batches)
    sums.add(asr_model.features(batch.audio.float(), batch.audio_lengths) for batch in moved)
    sum_over_ranks(sums.total)
    sum_over_ranks(sums.frames)
    for norm in fresh:
        norm.set_statistics(sums)
