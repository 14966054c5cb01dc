"""Loss and speed of a run are added up."""

from collections.abc import Iterator

import pytest
import torch

from sbkit.models.loss import Loss
from sbkit.train.metrics import Meter

CPU = torch.device("cpu")


def test_meter_adds_small_sums_exactly() -> None:
    meter = Meter(CPU)
    meter.add(Loss(torch.tensor([2.0**24]), torch.tensor([1])), 0.0)
    for _ in range(100):
        meter.add(Loss(torch.tensor([1.0]), torch.tensor([1])), 0.0)
    assert meter.read().sums["loss"][0] == 2**24 + 100  # float32 would have stayed at 2**24


def test_meter_separates_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slow_batches() -> Iterator[int]:
        for number in range(3):
            now[0] += 4.0
            yield number

    meter = Meter(CPU)
    for _ in meter.timed(slow_batches()):
        meter.add(Loss(torch.ones(1), torch.ones(1)), 10.0)
        now[0] += 1.0
    assert list(meter.timed(iter([]))) == []
    reading = meter.read()
    assert (reading.waiting_seconds, reading.wall_seconds) == (12.0, 15.0)
    assert (reading.rtfx, reading.data_wait_share) == (2.0, 0.8)
