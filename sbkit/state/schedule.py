"""Learning rate as a function of how far the run is: nothing to save, nothing to restore."""

import math
from collections.abc import Callable

Schedule = Callable[[float], float]  # share of the run, 0 to 1 -> share of the peak rate, 0 to 1


class WarmupCosine:
    """Rise in a line over the first ``warmup`` of the run, then fall along a half cosine to zero.

    Source: Loshchilov and Hutter 2017, without restarts.
    """

    def __init__(self, *, warmup: float) -> None:
        self.warmup = warmup

    def __call__(self, progress: float) -> float:
        """Give the factor at a share of the run."""
        if progress < self.warmup:
            return progress / self.warmup
        fallen = (progress - self.warmup) / (1 - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))


class WarmupHoldLinear:
    """Rise in a line, hold, and fall in a line to zero over the last ``cooldown`` of the run."""

    def __init__(self, *, warmup: float, cooldown: float) -> None:
        self.warmup, self.cooldown = warmup, cooldown

    def __call__(self, progress: float) -> float:
        """Give the factor at a share of the run."""
        return max(0.0, min(1.0, progress / self.warmup, (1 - progress) / self.cooldown))
