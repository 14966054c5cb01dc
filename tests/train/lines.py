"""Brains that fit a line to random rows, for tests of the training loop."""

from functools import partial
from typing import Any

import speechbrain as sb
import torch
from speechbrain import Stage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sbkit.models.loss import Loss
from sbkit.train.brain import Brain


class MeanBrain(Brain):
    """Fit (inputs, targets); the loss is a mean, as in SpeechBrain's recipes."""

    def compute_forward(self, batch: Any, stage: Stage) -> torch.Tensor:
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Stage) -> Any:
        return nn.functional.mse_loss(predictions, batch[1])


class LineBrain(MeanBrain):
    """Fit (inputs, targets); the loss is a sum over rows."""

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Stage) -> Loss:
        sums = (predictions - batch[1]).square().sum(1)
        return Loss(sums, torch.ones_like(sums))


class ScheduleFree(torch.optim.Optimizer):
    """SGD with the interface of `schedulefree`: gradients at y, steps of z, and their average x."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, train_mode: bool, weight: Any) -> None:
        for group in [g for g in self.param_groups if g["train_mode"] != train_mode]:
            group["train_mode"] = train_mode
            for p in group["params"]:
                p.lerp_(self.state[p].get("z", p), weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in [p for p in group["params"] if p.grad is not None]:
                z = self.state[p].setdefault("z", p.clone())
                away = group["beta"] * (1 - 1 / group["k"])
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (1 - away))
                z.sub_(p.grad, alpha=group["lr"])


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, 3), torch.randn(count, 2)


def loader(count: int, size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows(count)), batch_size=size)


def batches(count: int) -> DataLoader[Any]:
    return loader(2 * count, 2)


def line() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def brain_of(
    kind: type[sb.Brain] = MeanBrain,
    *,
    model: nn.Module | None = None,
    optimizer: Any = torch.optim.SGD,
    lr: float = 0.1,
    hparams: Any = None,
    checkpointer: Any = None,
    **run_opts: Any,
) -> Any:
    return kind(
        modules={"model": model or line()},
        opt_class=partial(optimizer, lr=lr),
        hparams=hparams,
        run_opts={"device": "cpu", **run_opts},
        checkpointer=checkpointer,
    )
