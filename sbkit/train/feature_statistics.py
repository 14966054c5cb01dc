"""Mean and deviation of the features, measured in one exact pass over the training set."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.data.batch import Batch
from sbkit.distributed.device import widest_float
from sbkit.distributed.ranks import sum_over_ranks
from sbkit.models.layers import GlobalNorm

Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def measure_features(
    model: nn.Module, compute: Compute, batches: Iterable[Batch], device: torch.device
) -> None:
    """Set the mean and deviation of every GlobalNorm that has none yet.

    ``compute`` makes features (B, T, M), zero past their lengths, of float audio (B, S) and its
    lengths (B,). Each rank walks its share; the sums are in float64, so
    that the order of a million utterances does not matter. A restored model is left as it is.
    """
    norms = [part for part in model.modules() if isinstance(part, GlobalNorm)]
    fresh = [norm for norm in norms if int(norm.frames) == 0]
    if not fresh:
        return
    frames = torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.zeros(2, len(fresh[0].mean), dtype=widest_float(device), device=device)
    for batch in batches:
        placed = batch.to(device)
        features, lengths = compute(placed.audio.float(), placed.audio_lengths)
        wide = features.to(sums.dtype).flatten(0, 1)  # (B*T, M)
        sums += torch.stack([wide.sum(0), wide.square().sum(0)])
        frames += lengths.sum()
    sum_over_ranks(sums)
    sum_over_ranks(frames)
    for norm in fresh:
        norm.set_statistics(sums, frames)


def measure_on_start(brain: Any, compute: Compute | None) -> None:
    """Measure the features of the training set of a Brain that has its run's loaders."""
    if brain.loaders is not None and compute is not None:
        batches = brain.pinging(brain.loaders.measure, "measure")
        measure_features(brain.modules, compute, batches, brain.device)
