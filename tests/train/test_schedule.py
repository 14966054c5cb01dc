"""The learning rate follows from the share of the run alone."""

import math

import pytest

from sbkit.train.schedule import WarmupCosine

HALF = math.sqrt(0.5)
FACTORS: list[tuple[WarmupCosine, float, float]] = [
    (WarmupCosine(warmup_fraction=0.2), 0.0, 0.0),
    (WarmupCosine(warmup_fraction=0.2), 0.1, 0.5),
    (WarmupCosine(warmup_fraction=0.2), 0.2, 1.0),
    (WarmupCosine(warmup_fraction=0.2), 0.4, 0.5 + HALF / 2),
    (WarmupCosine(warmup_fraction=0.2), 0.6, 0.5),
    (WarmupCosine(warmup_fraction=0.2), 1.0, 0.0),
    (WarmupCosine(warmup_fraction=0.2), 1.3, 0.0),
    (WarmupCosine(warmup_fraction=0.0), 0.0, 1.0),
]


@pytest.mark.parametrize(("schedule", "progress", "factor"), FACTORS)
def test_the_factor_at_a_share_of_the_run(
    schedule: WarmupCosine, progress: float, factor: float
) -> None:
    assert schedule(progress) == pytest.approx(factor, abs=1e-12)


SCHEDULES = [WarmupCosine(warmup_fraction=0.15), WarmupCosine(warmup_fraction=0.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_rises_once_and_falls_once_between_nothing_and_the_peak(schedule: WarmupCosine) -> None:
    factors = [schedule(step / 1000) for step in range(1001)]
    assert (min(factors), max(factors)) == (0.0, pytest.approx(1.0, abs=1e-5))
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
