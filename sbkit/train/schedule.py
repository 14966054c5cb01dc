"""Learning rate as a function of how far the run is: nothing to save, nothing to restore."""

import math
from collections.abc import Iterable
from typing import ClassVar

from torch.optim import Optimizer

from sbkit.config.ranges import SHARE


def set_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    """Set the learning rate of every group, times its `lr_scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)


class WarmupCosine:
    """Rise in a line over ``warmup_fraction`` of the run, then fall along a half cosine.

    Source: Loshchilov and Hutter 2017, without restarts.
    """

    RANGES: ClassVar = {"warmup_fraction": SHARE}

    def __init__(self, *, warmup_fraction: float) -> None:
        self.warmup_fraction = warmup_fraction

    def __call__(self, progress: float) -> float:
        """Return the factor at a share of the run."""
        if progress < self.warmup_fraction:
            return progress / self.warmup_fraction
        fallen = (progress - self.warmup_fraction) / (1 - self.warmup_fraction)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))
