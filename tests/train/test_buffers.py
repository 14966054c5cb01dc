"""A step that is skipped leaves no trace in what modules count while they train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.train.brain import Brain
from sbkit.train.model_state import RunningStatistics


class Replacing(nn.Module):
    """Keep a mean as SpeechBrain's normalization does: a plain tensor, and another each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        """Move the mean."""
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def state(module: nn.Module) -> list[Tensor]:
    """Copy what a module counts."""
    mean = [module.mean] if isinstance(module, Replacing) else list(module.buffers())
    return [each.clone() for each in mean]


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3), Replacing])
def test_a_skipped_step_is_undone_and_another_is_not(make: Callable[[], nn.Module]) -> None:
    module, statistics = make(), None
    statistics = RunningStatistics(module)
    before = state(module)
    for is_skipped in (True, False, True, False):
        statistics.save()
        module(torch.randn(4, 3) / (0 if is_skipped else 1))
        statistics.restore(torch.tensor(is_skipped))
        after = state(module)
        alike = all(map(torch.equal, after, before))
        assert alike is is_skipped
        assert all(each.isfinite().all() for each in after)
        before = after


class NormBrain(Brain):
    """Normalize by the batch, and lose the squares."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """Normalize."""
        outputs: Tensor = self.modules["norm"](batch)
        return outputs

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        """Lose."""
        return predictions.square().mean()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_bad_batch_does_not_stay_in_the_running_statistics(accumulation: int) -> None:
    torch.manual_seed(0)
    batches = list(torch.randn(8, 5, 3))
    batches[5][0, 0] = torch.nan
    norm = nn.BatchNorm1d(3)
    brain = NormBrain(
        modules={"norm": norm},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"device": "cpu", "grad_accumulation_factor": accumulation},
    )
    brain.fit(range(1), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert int(norm.num_batches_tracked) == 8 - accumulation
    assert all(each.isfinite().all() for each in norm.buffers())
