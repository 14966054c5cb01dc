"""The learning rate follows from the share of the run alone."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
from speechbrain.nnet.schedulers import NoamScheduler
from torch.optim.lr_scheduler import OneCycleLR

from sbkit.base.errors import SbkitError
from sbkit.train.schedule import WarmupCosine, check_schedule

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


def test_a_scheduler_of_another_kind_is_refused_in_a_sentence() -> None:
    """SpeechBrain's takes its optimizer, and torch's is made of one."""
    counter = SimpleNamespace(limit=3)
    for scheduler in (
        NoamScheduler(0.1, 100),
        partial(OneCycleLR, max_lr=0.1),
        "cosine",
        lambda progress: -progress,
    ):
        declared = {"lr": 0.1, "epoch_counter": counter, "lr_schedule": scheduler}
        with pytest.raises(SbkitError, match="`lr_schedule` must be a function from the progress"):
            check_schedule(declared)
