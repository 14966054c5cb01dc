"""Several optimizers share one exact step, and resume together."""

import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain
from sbkit.train.optimizers import assign_parameters
from sbkit.train.step import match_losses
from tests.train.lines import brain_of


class Pair(Brain):
    """A generator, and a discriminator of its output."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        generated = self.modules["generator"](batch)
        return self.modules["discriminator"](generated), self.modules["discriminator"](batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        fake, real = predictions
        ones = torch.ones(len(batch))
        return {
            "discriminator": Loss((real - 1).square().sum(1) + fake.square().sum(1), ones),
            "generator": Loss((fake - 1).square().sum(1), 2 * ones),
        }


class SpoiledPair(Pair):
    """A pair whose discriminator's loss is not finite."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        losses = super().compute_objectives(predictions, batch, stage)
        loss = losses["discriminator"]
        return {**losses, "discriminator": Loss(loss.sums / 0, loss.counts)}


RATES = {"generator": 0.1, "discriminator": 0.2}
OPTIMIZERS = {  # in another order than the losses
    "generator": {"parts": ["generator"], "opt_class": lambda p: SGD(p, lr=RATES["generator"])},
    "discriminator": {"opt_class": lambda p: SGD(p, lr=RATES["discriminator"])},
}


def pair(
    kind: type[Pair] = Pair,
    optimizers: dict[str, dict[str, Any]] = OPTIMIZERS,
    folder: Path | None = None,
    **options: Any,
) -> Pair:
    """folder: of its checkpoints."""
    torch.manual_seed(0)
    epochs = EpochCounter(2)
    modules = {"generator": nn.Linear(3, 3), "discriminator": nn.Linear(3, 1)}
    return kind(
        modules,
        hparams={"optimizers": optimizers, "epoch_counter": epochs},
        run_opts={"device": "cpu", "noprogressbar": True, "max_grad_norm": -1, **options},
        checkpointer=folder and Checkpointer(folder, recoverables={**modules, "epochs": epochs}),
    )


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 3)


def moves_of_fit(brain: Pair, *, size: int = 8) -> dict[str, torch.Tensor]:
    """Train, and return by how much the parameters of each module move."""
    before = {name: flat(module.parameters()) for name, module in brain.modules.items()}
    brain.fit([1], torch.utils.data.DataLoader(list(rows()), batch_size=size))  # type: ignore[arg-type]
    return {n: before[n] - flat(module.parameters()) for n, module in brain.modules.items()}


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def expected_gradients(brain: Pair) -> dict[str, torch.Tensor]:
    batch = rows()
    losses = brain.compute_objectives(brain.compute_forward(batch, None), batch, None)
    gradients = {}
    for name, module in brain.modules.items():
        mean = losses[name].sums.sum() / losses[name].counts.sum()
        gradients[name] = flat(torch.autograd.grad(mean, [*module.parameters()], retain_graph=True))
    return gradients


@pytest.mark.parametrize(("accumulation", "unlimited"), [(1, -1.0), (4, 0.0)])
def test_each_optimizer_steps_its_parts_by_its_loss(accumulation: int, unlimited: float) -> None:
    brain = pair(grad_accumulation_factor=accumulation, max_grad_norm=unlimited)
    expected = expected_gradients(brain)
    moves = moves_of_fit(brain, size=8 // accumulation)
    for name, rate in RATES.items():
        torch.testing.assert_close(moves[name], rate * expected[name])


def test_each_optimizer_is_clipped_by_its_own_norm() -> None:
    for name, move in moves_of_fit(pair(max_grad_norm=0.01)).items():
        assert float(move.norm()) == pytest.approx(RATES[name] * 0.01, rel=1e-3)


def test_optimizers_skip_a_step_together() -> None:
    brain = pair(kind=SpoiledPair, nonfinite_patience=9)
    assert not flat(moves_of_fit(brain).values()).any()
    assert brain.nonfinite_count == 1


def test_single_loss_moves_all_optimizers() -> None:
    class Alone(Pair):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return predictions[0].square().mean()

    muon = {"parts": ["matrices"], "opt_class": Muon}
    declared = {"matrices": muon, "rest": {"opt_class": AdamW}}
    brain = pair(Alone, declared, remove_vector_weight_decay=True)
    assert flat(moves_of_fit(brain).values()).all()
    optimizers: dict[str, Optimizer] = brain.optimizers_dict
    assert [type(optimizer) for optimizer in optimizers.values()] == [Muon, AdamW]
    decays = [group["weight_decay"] for group in optimizers["rest"].param_groups]
    assert decays == [0.0, 0.01]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"a": {"parts": ["body"]}}, "but cnn.weight, head.bias, head.weight are in none"),
        ({"a": {"parts": ["body"]}, "b": {"parts": ["*"]}}, "`body.weight` is in a and in b"),
        ({"a": {"parts": ["bodies"]}, "b": {}}, "there is no `bodies`"),
        ({"a": {}, "b": {}}, "The optimizer b has nothing to step"),
        ({"a": {"parts": ["head.vectors"]}, "b": {"parts": ["*"]}}, "`head.bias` is in a and in b"),
        ({"a": {"parts": ["body.vectors"]}, "b": {}}, "there is no `body.vectors`"),
        ({"a": {"parts": ["vectors"]}, "b": {"parts": ["matrices"]}}, "but cnn.weight are in none"),
    ],
)
def test_parts_that_do_not_divide_the_parameters_are_refused(
    declared: dict[str, Any], message: str
) -> None:
    cnn, body = nn.Conv1d(2, 2, 3, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"cnn": cnn, "body": body, "head": nn.Linear(2, 1)})
    named = dict(sorted(model.named_parameters()))
    with pytest.raises(SbkitError, match=message.replace("*", r"\*")):
        assign_parameters(declared, named)


def test_word_that_is_also_the_name_of_a_part_is_refused() -> None:
    named = dict(nn.ModuleDict({"matrices": nn.Linear(1, 1)}).named_parameters())
    with pytest.raises(SbkitError, match=r"`matrices` is also a part. Write `matrices\*` if"):
        assign_parameters({"a": {"parts": ["matrices"]}, "b": {}}, named)
    assert assign_parameters({"a": {"parts": ["matrices*"]}}, named) == {"a": named}


def test_parameters_that_an_optimizer_refuses_are_named() -> None:
    muon, adam = {"parts": ["generator"], "opt_class": Muon}, {"opt_class": AdamW}
    with pytest.raises(SbkitError, match=r"`optimizers.muon` .* for generator.bias. In `opt"):
        pair(optimizers={"muon": muon, "adam": adam}).init_optimizers()
    with pytest.raises(SbkitError, match=r"`opt_class` .*rate: -1\) for all .* model.weight"):
        brain_of(lr=-1).init_optimizers()


def test_loss_with_unknown_name_is_refused() -> None:
    losses = {"generator": torch.ones(()), "critic": torch.ones(())}
    with pytest.raises(SbkitError, match="but returned generator, critic"):
        match_losses(losses, ["generator", "discriminator"])


def fit(brain: Pair) -> None:
    options = {"batch_size": 2}  # such a loader saves its position
    brain.fit(brain.hparams.epoch_counter, list(rows()), train_loader_kwargs=options)


def test_stopped_run_resumes_with_the_state_of_each_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = {
        "generator": {"parts": ["generator"], "opt_class": partial(AdamW, lr=0.1)},
        "discriminator": {"opt_class": partial(SGD, lr=0.1, momentum=0.9)},
    }
    folders = (tmp_path / "whole", tmp_path, tmp_path)
    whole, stopped, resumed = (pair(optimizers=declared, folder=folder) for folder in folders)
    fit(whole)

    def stop_after_step_5(*_: object) -> None:
        if stopped.optimizer_step == 5:
            stopped.stopping.signals.received = signal.SIGTERM

    monkeypatch.setattr(stopped, "on_fit_batch_end", stop_after_step_5)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped)
    fit(resumed)
    assert resumed.optimizer_step == whole.optimizer_step == 8
    for name, optimizer in whole.optimizers_dict.items():
        states = resumed.optimizers_dict[name].state_dict(), optimizer.state_dict()
        torch.testing.assert_close(*states, rtol=0, atol=0)
    weights = (flat(brain.modules.parameters()) for brain in (resumed, whole))
    assert torch.equal(*weights)
