"""Sums over the steps of a run, on the device, read once in a while."""

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sbkit.distributed.device import widest_float
from sbkit.distributed.ranks import rank, sum_over_ranks, world_size
from sbkit.models.loss import Loss

Batched = TypeVar("Batched")


@dataclass(frozen=True)
class MetricTotals:
    """What happened since a meter was last read, over all ranks."""

    loss_sum: float
    labels: float
    audio_seconds: float
    wall_seconds: float
    waiting_seconds: float  # mean over the ranks
    skipped: float = 0.0  # steps whose gradient was not finite

    @property
    def loss(self) -> float:
        """Mean loss per label."""
        return self.loss_sum / self.labels if self.labels else float("nan")

    @property
    def rtfx(self) -> float:
        """Seconds of audio per second."""
        return self.audio_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data."""
        return self.waiting_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def __add__(self, other: "MetricTotals") -> "MetricTotals":
        """Add two stretches of a run."""
        return MetricTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


ZERO = MetricTotals(0.0, 0.0, 0.0, 0.0, 0.0)


class Meter:
    """Add losses without making the host wait for the device; the one wait is in `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset()

    def add(self, loss: Loss, audio_seconds: float) -> None:
        """Count one micro-batch of this rank; a loss that is not finite is no part of a mean."""
        both = torch.stack([loss.sums.detach().sum(), loss.counts.sum()]).to(self._loss)
        self._loss += torch.where(both[0].isfinite(), both, 0.0)
        self._audio_seconds += audio_seconds

    def timed(self, batches: Iterator[Batched]) -> Iterator[Batched]:
        """Yield the batches, and count the time spent waiting for them."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self._waiting_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def read(self) -> MetricTotals:
        """Sum over ranks, transfer once, and start anew."""
        reading = self.peek()
        self._reset()
        return reading

    def resume(self, unread: MetricTotals) -> None:
        """Continue from the sums of a stopped run: rank 0 adds those of all ranks."""
        self._started -= unread.wall_seconds
        if rank() == 0:
            self._loss += torch.tensor([unread.loss_sum, unread.labels], dtype=torch.float64).to(
                self._loss
            )
            self._audio_seconds += unread.audio_seconds
            self._waiting_seconds += unread.waiting_seconds * world_size()
        self.skipped += unread.skipped

    def peek(self) -> MetricTotals:
        """Sum over ranks, transfer once, and leave the meter as it is."""
        host = torch.tensor([self._audio_seconds, self._waiting_seconds], dtype=torch.float64)
        sums = sum_over_ranks(torch.cat([self._loss, host.to(self._loss)])).tolist()
        wall_seconds = time.perf_counter() - self._started
        loss_sum, labels, audio_seconds, waiting_seconds = sums
        waiting_seconds /= world_size()
        return MetricTotals(
            loss_sum, labels, audio_seconds, wall_seconds, waiting_seconds, self.skipped
        )

    def _reset(self) -> None:
        dtype = widest_float(self._device)
        self._loss: Tensor = torch.zeros(2, dtype=dtype, device=self._device)
        self._audio_seconds = 0.0
        self._waiting_seconds = 0.0
        self.skipped = 0.0  # the same on every rank
        self._started = time.perf_counter()
