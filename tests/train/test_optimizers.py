"""`freeze`, `lr_scale` and `layer_decay` choose what learns, and how fast."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from speechbrain.nnet.schedulers import NewBobScheduler
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from sbkit.base.errors import SbkitError
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import GlobalNorm
from sbkit.models.transformer import Transformer
from sbkit.train.brain import Brain
from sbkit.train.optimizers import Freezing, with_rates
from sbkit.train.step import share_batch_norms
from tests import processes
from tests.models.pretrained.folders import make_parts, tiny_config
from tests.train import fine_tuning
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
    *, batches: int = 1, optimizer: Any = AdamW, lr: float = 0.1, **settings: Any
) -> tuple[Line, list[State]]:
    """Train; return the state before and after each micro-batch."""
    torch.manual_seed(0)
    hparams = {**parts(), **settings}
    model = hparams["model"]
    options = {"optimizer": optimizer, "lr": lr, "noprogressbar": True}
    brain = brain_of(Line, model=model, hparams=hparams, **options)
    brain.states = [state_of(model)]
    brain.fit(range(1, 2), DataLoader(list(torch.randn(batches, 4, 2)), batch_size=None))  # type: ignore[arg-type]
    return brain, brain.states


def test_lr_scale_refuses_unknown_path() -> None:
    for path, message in {"CNNs": "Did you mean `CNN`", "model": "are CNN, head"}.items():
        for setting, value in {"freeze": [path], "lr_scale": {path: 0.1}}.items():
            with pytest.raises(SbkitError, match=f"`{setting}`: there is no .*{message}"):
                fit(**{setting: value})


@pytest.mark.parametrize("key", ["lr_scale", "layer_decay"])
def test_negative_scale_is_refused(key: str) -> None:
    """It would climb the loss."""
    with pytest.raises(SbkitError, match=f"`{key}` must be .* numbers of at least 0, but is"):
        fit(**{key: {"CNN": -0.1}})


def test_lr_scale_refuses_scheduler_with_one_rate_for_all() -> None:
    annealing = {"lr_annealing": NewBobScheduler(0.1)}
    with pytest.raises(SbkitError, match=r"`lr_annealing` \(NewBobScheduler\) sets one rate"):
        with_rates(SGD, parts() | annealing | {"lr_scale": {"CNN": 0.1}})
    assert with_rates(SGD, parts() | annealing)([nn.Parameter(torch.ones(1))]).defaults["lr"] > 0


def test_lr_scale_uses_longest_path_and_keeps_groups() -> None:
    scales = {"CNN.0": 0.5, "CNN": 0.1}
    brain, _ = fit(lr_scale=scales, remove_vector_weight_decay=True, optimizer=SGD, lr=1.0)
    groups = brain.optimizer.param_groups
    rates = [(group["lr_scale"], group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [(scale, scale, 0.0) for scale in (1.0, 0.5, 0.1, 1.0, 0.5)]
    counted = sum(len(group["params"]) for group in groups)
    assert counted == len(list(brain.modules.parameters()))


def test_layer_decay_slows_layers_farther_from_the_head() -> None:
    decay = {"CNN": 0.1}
    brain, _ = fit(lr_scale={"CNN": 0.5}, layer_decay=decay, optimizer=SGD, lr=1.0)
    rates = [group["lr"] for group in brain.optimizer.param_groups]
    assert rates == pytest.approx([1.0, 0.5e-3, 0.5e-2])  # of the head, CNN.0 of 3, CNN.1


def test_layer_decay_requires_a_list_of_layers() -> None:
    """A pattern is refused, because its lists would be numbered as one."""
    with pytest.raises(SbkitError, match=r"there is no `\*\.0`.*lists"):
        fit(layer_decay={"*": 0.1})


# ---- `freeze`


def moved(before: State, after: State) -> set[str]:
    return {name for name in after if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [
        (["CNN"], "0."),  # weights and statistics
        (["CNN.0", "head.bias"], ("0.0.", "1.bias")),
        ({"CNN.0": 0, "CNN": "always"}, "0.1."),  # the longest path decides
    ],
)
def test_frozen_part_stays_as_it_is(freeze: Any, frozen: str | tuple[str, ...]) -> None:
    _, (before, after) = fit(freeze=freeze)
    assert before.keys() - moved(before, after) == {n for n in before if n.startswith(frozen)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_part_frozen_for_some_steps_learns_afterwards(accumulation: int) -> None:
    """It joins in with the first micro-batch of a step."""
    frozen, every_name = {"1.weight", "1.bias"}, set(parts()["model"].state_dict())
    brain, states = fit(
        freeze={"CNN": 2},
        batches=4 * accumulation,
        grad_accumulation_factor=accumulation,
        max_grad_norm=-1,
        remove_vector_weight_decay=True,
    )
    steps = states[::accumulation]
    changes = [moved(*pair) for pair in zip(steps, steps[1:], strict=False)]
    assert changes == [frozen, frozen, every_name, every_name]
    within = [moved(*pair) & frozen for pair in zip(states, states[1:], strict=False)]
    assert within == [*[set()] * (accumulation - 1), frozen] * 4
    cnn, head = brain.modules["model"]
    state = brain.optimizer.state
    assert [state[part.weight]["step"] for part in (cnn[0], head)] == [2, 4]
    decays = [group["weight_decay"] for group in brain.optimizer.param_groups]
    assert decays == [0.0, 0.01]


def test_part_frozen_later_is_moved_by_neither_momentum_nor_weight_decay() -> None:
    """It learns again with the moments that it had."""
    brain, states = fit(freeze={"CNN": [1, 3], "head.bias": [4, "always"]}, batches=5)
    changes = [moved(*pair) for pair in zip(states, states[1:], strict=False)]
    every_name, of_head = {*states[0]}, {"1.weight", "1.bias"}
    assert changes == [every_name, of_head, of_head, every_name, every_name - {"1.bias"}]
    cnn, head = brain.modules["model"]
    moments = [brain.optimizer.state[p]["step"] for p in (cnn[0].weight, head.bias, head.weight)]
    assert moments == [3, 4, 5]


def test_freezing_keeps_parameters_frozen_by_an_adapter() -> None:
    """LoRA freezes the weights that it adapts; they stay frozen when `freeze` ends."""
    hparams = {**parts(), "freeze": {"CNN": 1}}
    hparams["CNN"][0].requires_grad_(False)
    freezing = Freezing(hparams)
    assert [freezing.advance(step) for step in (0, 0, 1, 2)] == [True, False, True, False]
    assert not hparams["CNN"][0].weight.requires_grad
    assert hparams["CNN"][1].weight.requires_grad


def test_shared_part_can_be_frozen_by_its_own_name() -> None:
    hparams = parts()
    hparams["CNN"].append(hparams["head"])
    Freezing(hparams | {"freeze": ["head"]})
    assert not hparams["head"].weight.requires_grad


def test_frozen_synchronized_normalization_keeps_statistics() -> None:
    """Torch's `convert_sync_batchnorm` would replace the frozen module by one that learns."""
    hparams, x = parts(), torch.randn(4, 2)
    freezing = Freezing(hparams | {"freeze": ["CNN.1"]})
    expected = hparams["CNN"].eval()(x)
    norm = hparams["CNN"][1]
    share_batch_norms(hparams["model"])
    freezing.set_mode()
    assert torch.equal(hparams["CNN"](x), expected)
    assert isinstance(norm, nn.SyncBatchNorm) and hparams["CNN"][1] is norm


@pytest.mark.parametrize(
    "freeze",
    [
        *({"CNN": "ever"}, {"CNN": -1}, "CNN", [{"CNN": 1000}]),
        *({"CNN": steps} for steps in ([5], [5, 1], ["always", 5], [0, 5, 9])),
    ],
)
def test_freeze_without_steps_is_refused(freeze: Any) -> None:
    with pytest.raises(SbkitError, match="`freeze` must be a list of paths .* number of steps"):
        fit(freeze=freeze)


def small_encoder() -> list[nn.Module]:
    norm = GlobalNorm(n_mels=8)
    width: Any = {"d_model": 24, "nhead": 2, "d_ffn": 16, "num_encoder_layers": 2}
    front_end = ConvFrontEnd(normalize=norm, n_mels=8, channels=4, d_model=24)
    return [front_end, Transformer(**width, gradient_checkpointing=True)]


def pretrained_encoder() -> list[nn.Module]:
    return [*make_parts(tiny_config(conv_bias=True), gradient_checkpointing=True)]


@pytest.mark.parametrize(
    ("parts", "x"),
    [(small_encoder, torch.randn(2, 80, 8)), (pretrained_encoder, torch.randn(2, 800, 1))],
)
def test_frozen_encoder_keeps_no_activations(
    parts: Callable[[], list[nn.Module]], x: torch.Tensor
) -> None:
    """Only the input of the head is saved for the backward pass."""
    model = nn.ModuleList([*parts(), nn.Linear(24, 5)])
    hparams = dict(zip(("CNN", "Transformer", "head"), model, strict=True))
    freezing = Freezing({**hparams, "model": model, "freeze": {"CNN": "always", "Transformer": 1}})

    def saved(step: int) -> list[torch.Size]:
        freezing.advance(step)
        model.train()
        freezing.set_mode()
        sizes = list[torch.Size]()
        with saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
            states, frames = hparams["CNN"](x, torch.tensor([x.shape[1], x.shape[1] // 2]))
            hparams["head"](hparams["Transformer"](states, frames)[0]).sum()
        return sizes

    assert saved(0) == [(2 * 20, 24)]
    assert len(saved(1)) > 1


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_fine_tune_like_one() -> None:
    """With LayerDrop, masks, checkpointing, adapters, and `find_unused_parameters` false."""
    process = processes.run(["-m", "tests.train.fine_tuning"], ranks=2)
    assert (process.returncode, process.stderr) == (0, "")
    shared, alone = json.loads(process.stdout), fine_tuning.train()
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
