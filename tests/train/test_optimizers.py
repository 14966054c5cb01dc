"""`lr_scale` and `layer_decay` lower the rate of parts."""

import re

import pytest
from speechbrain.nnet.schedulers import NewBobScheduler
from torch.optim import SGD

from sbkit.base.errors import SbkitError
from sbkit.train.optimizers import with_lr_scale
from tests.train.two_parts import fit, parts


@pytest.mark.parametrize(
    ("path", "message"),
    [("CNNs", "Did you mean `CNN`"), ("model", "are CNN, head")],
)
def test_lr_scale_refuses_unknown_path(path: str, message: str) -> None:
    for knob, value in {"freeze": [path], "lr_scale": {path: 0.1}}.items():
        with pytest.raises(SbkitError, match=f"`{knob}`: there is no .*{message}"):
            fit(**{knob: value})


@pytest.mark.parametrize("key", ["lr_scale", "layer_decay"])
def test_negative_scale_is_refused(key: str) -> None:
    """It would climb the loss."""
    with pytest.raises(SbkitError, match=f"`{key}` must be .* numbers of at least 0, but is"):
        fit(**{key: {"CNN": -0.1}})


def test_lr_scale_refuses_scheduler_with_one_rate_for_all() -> None:
    annealing = {"lr_annealing": NewBobScheduler(0.1)}
    with pytest.raises(SbkitError, match=r"`lr_annealing` \(NewBobScheduler\) sets one rate"):
        with_lr_scale(SGD, parts() | annealing | {"lr_scale": {"CNN": 0.1}})
    assert with_lr_scale(SGD, parts() | annealing) is SGD


def test_lr_scale_uses_longest_path_and_keeps_groups() -> None:
    scales = {"CNN.0": 0.5, "CNN": 0.1}
    brain, _ = fit(lr_scale=scales, remove_vector_weight_decay=True, optimizer=SGD, lr=1.0)
    groups = brain.optimizer.param_groups
    rates = [(group["lr_scale"], group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [
        (1.0, 1.0, 0.0),
        (0.5, 0.5, 0.0),
        (0.1, 0.1, 0.0),
        (1.0, 1.0, 0),
        (0.5, 0.5, 0),
    ]
    counted = sum(len(group["params"]) for group in groups)
    assert counted == len(list(brain.modules.parameters()))


def test_layer_decay_slows_layers_farther_from_the_head() -> None:
    decay = {"CNN": 0.1}
    brain, _ = fit(lr_scale={"CNN": 0.5}, layer_decay=decay, optimizer=SGD, lr=1.0)
    rates = [group["lr"] for group in brain.optimizer.param_groups]
    assert rates == pytest.approx([1.0, 0.5e-3, 0.5e-2])  # of the head, CNN.0 of 3, CNN.1


@pytest.mark.parametrize("path", ["head", "*"])
def test_layer_decay_requires_a_list_of_layers(path: str) -> None:
    """A pattern is refused, because its lists would be numbered as one."""
    with pytest.raises(SbkitError, match=rf"there is no `{re.escape(path)}\.0`.*the lists"):
        fit(layer_decay={path: 0.1})
