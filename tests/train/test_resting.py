"""What the knobs turn off is declared, and no note of a run on several ranks complains of it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sbkit.train import brain
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
    made._ddp_step = SimpleNamespace(is_wrapped=False, wrap=lambda batch: unused)  # type: ignore[assignment]
    monkeypatch.setattr(brain, "world_size", lambda: 2)
    made._wrap_step(torch.zeros(1))
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) == bool(said)
