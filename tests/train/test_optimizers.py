"""Parts that learn slower, by their paths."""

from typing import Any

import pytest
import torch
from speechbrain.nnet.schedulers import NewBobScheduler
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from sbkit.base.errors import SbkitError
from sbkit.train.brain import Brain
from sbkit.train.optimizers import with_lr_scale


def parts() -> dict[str, Any]:
    cnn = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    head = nn.Linear(3, 1)
    return {"CNN": cnn, "head": head, "model": nn.ModuleList([cnn, head])}


class Line(Brain):
    """Fit a line."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        model = self.modules["model"]
        return model[1](model[0](batch))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.square().mean()


def fit(**knobs: Any) -> tuple[Line, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    hparams = {**parts(), **knobs}
    before = {name: each.clone() for name, each in hparams["model"].state_dict().items()}
    brain = Line(
        modules={"model": hparams["model"]},
        opt_class=lambda groups: SGD(groups, lr=1.0),
        hparams=hparams,
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    brain.fit(range(1, 2), DataLoader([torch.randn(4, 2)], batch_size=None))
    return brain, before, hparams["model"].state_dict()


@pytest.mark.parametrize(
    ("path", "said"),
    [("CNNs", "Did you mean `CNN`"), ("CNN.9", "there is no `CNN.9`"), ("model", "are CNN, head")],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, said: str) -> None:
    for knob, value in {"freeze": [path], "lr_scale": {path: 0.1}}.items():
        with pytest.raises(SbkitError, match=f"`{knob}` must name modules .*{said}"):
            fit(**{knob: value})


def test_a_scheduler_that_sets_one_rate_for_all_is_refused() -> None:
    annealing = {"lr_annealing": NewBobScheduler(0.1)}
    with pytest.raises(SbkitError, match=r"`lr_annealing` \(NewBobScheduler\) sets one rate"):
        with_lr_scale(SGD, parts() | annealing | {"lr_scale": {"CNN": 0.1}})
    assert with_lr_scale(SGD, parts() | annealing) is SGD


def test_rates_go_by_the_longest_path_and_keep_their_groups() -> None:
    scales = {"CNN.0": 0.5, "CNN": 0.1}
    brain, _, _ = fit(lr_scale=scales, remove_vector_weight_decay=True)
    groups = brain.optimizer.param_groups
    found = [(group["lr_scale"], group["lr"], group["weight_decay"]) for group in groups]
    assert found == [
        (1.0, 1.0, 0.0),
        (0.5, 0.5, 0.0),
        (0.1, 0.1, 0.0),
        (1.0, 1.0, 0),
        (0.5, 0.5, 0),
    ]
    counted = sum(len(group["params"]) for group in groups)
    assert counted == len(list(brain.modules.parameters()))


def test_layers_learn_the_slower_the_farther_they_are_from_the_head() -> None:
    brain, _, _ = fit(lr_scale={"CNN": 0.5}, layer_decay={"CNN": 0.1})
    rates = [group["lr"] for group in brain.optimizer.param_groups]
    assert rates == pytest.approx([1.0, 0.5e-3, 0.5e-2])  # of the head, CNN.0 of 3, CNN.1


def test_layers_are_those_of_a_list() -> None:
    with pytest.raises(SbkitError, match=r"`layer_decay` must .* there is no `head.0`"):
        fit(layer_decay={"head": 0.1})
