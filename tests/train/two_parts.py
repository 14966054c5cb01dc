"""A Brain of two small parts, and the state of its model around each micro-batch."""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from sbkit.train.brain import Brain
from tests.train.lines import brain_of


def parts() -> dict[str, Any]:
    cnn = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    head = nn.Linear(3, 1)
    return {"CNN": cnn, "head": head, "model": nn.ModuleList([cnn, head])}


State = dict[str, torch.Tensor]


class Line(Brain):
    def compute_forward(self, batch: Any, stage: Any) -> Any:
        model = self.modules["model"]
        return model[1](model[0](batch))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.square().mean()

    def on_fit_batch_end(self, *_: Any) -> None:
        self.states.append(state_of(self.modules["model"]))


def state_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def fit(
    *, batches: int = 1, optimizer: Any = AdamW, lr: float = 0.1, **knobs: Any
) -> tuple[Line, list[State]]:
    """Train; return the state before and after each micro-batch."""
    torch.manual_seed(0)
    hparams = {**parts(), **knobs}
    model = hparams["model"]
    options = {"optimizer": optimizer, "lr": lr, "noprogressbar": True}
    brain = brain_of(Line, model=model, hparams=hparams, **options)
    brain.states = [state_of(model)]
    brain.fit(range(1, 2), DataLoader(list(torch.randn(batches, 4, 2)), batch_size=None))  # type: ignore[arg-type]
    return brain, brain.states
