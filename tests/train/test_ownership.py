"""What gets a gradient in `fit` is in `modules` and in an optimizer, or no step is taken."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.base.errors import ConfigError, DeviceError
from tests.train.lines import MeanBrain, batches, brain_of


@dataclass(slots=True)
class Holder:
    layer: nn.Module


def own_step(self: Any, batch: Any) -> Tensor:
    """Step one optimizer after the other, without `optimizers_step`, as GANs do."""
    *_, last = optimizers = [*self.optimizers_dict.values()]
    for optimizer in optimizers:
        loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        inputs = None if optimizer is last else optimizer.param_groups[0]["params"]
        torch.autograd.backward(loss, inputs=inputs)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def recipe(head: Callable[[Tensor], Tensor], **attributes: Any) -> Any:
    """Make a Brain whose `compute_forward` runs a head that may be anywhere."""

    def compute_forward(self: Any, batch: Any, stage: Any) -> Tensor:
        return head(self.modules.model(batch[0]))

    return type("Recipe", (MeanBrain,), {"compute_forward": compute_forward, **attributes})


both_steps = pytest.mark.parametrize("step", [{}, {"fit_batch": own_step}], ids=["default", "own"])
PLACES: dict[str, Callable[[nn.Module], Any]] = {
    "hparams.loss.weight": lambda layer: layer,
    "hparams.loss.0.lm.weight": lambda layer: [{"lm": layer}],
    "hparams.loss.lm.layer.weight": lambda layer: SimpleNamespace(lm=Holder(layer)),
    "hparams.loss.weight` (2, 2) is": lambda layer: partial(torch.matmul, weight=layer.weight),
}


@both_steps
@pytest.mark.parametrize("place", [*PLACES, "brain.loss.weight", "Recipe.loss.weight"])
def test_layer_outside_the_modules_is_named_before_the_first_step(place: str, step: Any) -> None:
    layer = nn.Linear(2, 2, bias=False)
    hparams = {"loss": PLACES[place](layer)} if place in PLACES else None
    brain = brain_of(recipe(layer, **step), hparams=hparams)
    if place not in PLACES:
        holder: Any = brain if place.startswith("brain") else type(brain)
        holder.loss = layer
    model = brain.modules.model
    before = model.weight.clone()
    model.requires_grad_(False)  # so the layer alone has a gradient
    with pytest.raises(ConfigError, match=re.escape(f"in an optimizer, but `{place}")):
        brain.fit([1], batches(2))
    model.requires_grad_()
    layer.requires_grad_(False)  # which still has its gradient
    assert torch.equal(model.weight, before)
    brain.fit([1], batches(2))
    assert not torch.equal(model.weight, before)


@both_steps
@pytest.mark.parametrize("stray", ["", "modules.head", "modules.model", "extra"])
def test_optimizers_have_all_that_learns(stray: str, step: Any) -> None:
    """Also what gets a gradient from the loss of the second one alone."""
    head, extra = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(stray == "extra")

    def init_optimizers(self: Any) -> None:
        parts = {name: part for name, part in self.modules.items() if name not in stray}
        self.optimizers_dict = {n: torch.optim.SGD(parts[n].parameters(), lr=0.1) for n in parts}

    brain = brain_of(recipe(nn.Sequential(head, extra), init_optimizers=init_optimizers, **step))
    brain.modules["head"], brain.extra = head, extra
    error = pytest.raises(ConfigError, match=rf"`brain.{stray}.weight` \(2, .\), .* are not")
    with error if stray else nullcontext():
        brain.fit([1], batches(2))


def test_parts_that_a_recipe_may_keep_outside_its_modules() -> None:
    """A language model trained before, a frozen encoder, tied weights; with accumulation."""
    lm, encoder, tied = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(3, 2)
    lm(torch.ones(2)).sum().backward()

    def head(x: Tensor) -> Tensor:
        with torch.no_grad():
            lm(x)
        return encoder(x)

    hparams = {"search": Holder(lm), "ssl": encoder, "tied": tied}
    kind = recipe(head, helpers=("ssl",))
    brain = brain_of(kind, hparams=hparams, grad_accumulation_factor=2)
    tied.weight = brain.modules.model.weight
    brain.fit([1, 2], batches(4))
    assert brain.optimizer_step == 4 and not encoder.training


def test_state_of_an_optimizer_on_another_device_is_named() -> None:
    class Misplaced(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.lerp_(self.state[p].setdefault("m", torch.ones_like(p, device="meta")), 0.1)

    with pytest.raises(DeviceError, match="state of Misplaced for `.*weight` on meta.*zeros_like"):
        brain_of(optimizer=Misplaced).fit([1], batches(2))


def test_layer_on_another_device_is_named() -> None:
    brain = brain_of(recipe(head := nn.Linear(2, 2, device="meta")), hparams={"head": head})
    for run in (lambda: brain.fit([1], batches(2)), lambda: brain.evaluate(batches(2))):
        with pytest.raises(DeviceError, match="device cpu, but use `hparams.head.weight` on meta"):
            run()
