"""What the knobs turn off is declared, and no note of a run on several ranks complains of it."""

from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from sbkit.train import step, step_brain
from sbkit.train.brain import Brain


class HalfAsleep(Brain):
    @property
    def resting(self) -> tuple[nn.Module, ...]:
        return (self.modules["decoder"],)


@pytest.mark.parametrize(
    ("unused", "said"),
    [
        (["decoder.bias", "decoder.weight"], ""),
        (["decoder.bias", "encoder.weight"], "1 of the model's parameters (encoder.weight) gets"),
        (["encoder.bias", "encoder.weight"], "2 of the model's parameters (encoder.bias, enc"),
    ],
)
def test_only_what_is_not_declared_to_rest_is_told(
    unused: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = HalfAsleep({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    monkeypatch.setattr(step, "freeze_unused", lambda graph, batch, device: unused)
    monkeypatch.setattr(step, "DistributedDataParallel", lambda graph, **_: MagicMock())
    monkeypatch.setattr(step_brain, "world_size", lambda: 2)
    made.wrap_step()
    made.ddp_step.share_first(torch.zeros(1), resting=made.resting)
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) == bool(said)
