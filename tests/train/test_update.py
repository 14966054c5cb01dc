"""An update of the weights takes few operations."""

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from sbkit.train import loop
from tests.train.lines import LineBrain, batches, brain_of


def test_update_of_more_parameters_takes_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a small model on a GPU would otherwise wait for the host."""

    class CountOperations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            self.count += 1
            return call(*args, **(kw or {}))

    step_or_skip = loop.step_or_skip
    counts: list[int] = []

    def counted(brain: LineBrain) -> None:
        with CountOperations() as counter:
            step_or_skip(brain)
        counts.append(counter.count)

    monkeypatch.setattr(loop, "step_or_skip", counted)
    for layers in (1, 9):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)), nn.Linear(3, 2))
        brain = brain_of(LineBrain, model=model, optimizer=partial(AdamW, fused=True))
        brain.fit([1], batches(2))
    _, small, _, large = counts  # the first update of each makes the optimizer's state
    assert small == large
