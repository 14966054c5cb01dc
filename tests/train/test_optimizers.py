"""Parts that do not learn, and parts that learn slower, by their paths."""

from typing import Any

import pytest
import torch
from speechbrain.nnet.schedulers import NewBobScheduler
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from sbkit.base.errors import SbkitError
from sbkit.train.brain import Brain
from sbkit.train.ddp import share_batch_norms
from sbkit.train.optimizers import freeze, with_lr_scale


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


def test_a_frozen_part_stays_as_it_is_with_its_statistics() -> None:
    _, before, after = fit(freeze=["CNN"])
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) is name.startswith("0."), name


def test_a_layer_of_a_part_can_be_frozen() -> None:
    _, before, after = fit(freeze=["CNN.0", "head.bias"])
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert same == {"0.0.weight", "0.0.bias", "1.bias"}


def test_a_part_that_another_one_holds_too_is_found_under_its_own_name() -> None:
    hparams = parts()
    hparams["CNN"].append(hparams["head"])
    freeze(["head"], hparams)
    assert not hparams["head"].weight.requires_grad


def test_a_frozen_normalization_that_ranks_share_stays_so() -> None:
    """Torch's `convert_sync_batchnorm` put another module in its place, which went on learning."""
    hparams, x = parts(), torch.randn(4, 2)
    (norm,) = freeze(["CNN.1"], hparams)
    expected = hparams["CNN"].eval()(x)
    share_batch_norms(hparams["model"])
    assert torch.equal(hparams["CNN"](x), expected)
    assert isinstance(norm, nn.SyncBatchNorm) and hparams["CNN"][1] is norm


@pytest.mark.parametrize(
    ("path", "said"),
    [("CNNs", "Did you mean `CNN`"), ("CNN.9", "there is no `CNN.9`"), ("model", "are CNN, head")],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, said: str) -> None:
    with pytest.raises(SbkitError, match=f"`freeze` must name modules .*{said}"):
        freeze([path], parts())
    with pytest.raises(SbkitError, match=f"`lr_scale` must name modules .*{said}"):
        with_lr_scale(SGD, {path: 0.1}, parts())


def test_a_scheduler_that_sets_one_rate_for_all_is_refused() -> None:
    annealing = {"lr_annealing": NewBobScheduler(0.1)}
    with pytest.raises(SbkitError, match=r"`lr_annealing` \(NewBobScheduler\) sets one rate"):
        with_lr_scale(SGD, {"CNN": 0.1}, parts() | annealing)
    assert with_lr_scale(SGD, {}, parts() | annealing) is SGD


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
