"""What `test_waiting.py` tells in a process of its own: runs on an accelerator."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import speechbrain as sb
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sbkit
from recipes.asr.brain import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP
from sbkit.checkpoint.rng import random_state, restore_random_state
from sbkit.data.batches.batch import Batch
from sbkit.logs.log import read_log
from tests import pretended, speechbrain_recipe
from tests.faulty import noisy_clip, noisy_workplace, write_fragile
from tests.pretended import DEVICE, NAME, waits
from tests.runs import Workplace, make_workplace, one_thread, read_json, stopped_after
from tests.test_run import SPEECHBRAINS_MASKS

FEWER = {"train": 4, "dev": 1, "test": 1}
FEW = {"train": 9, "dev": 2, "test": 1}
SMALL = ("--number_of_epochs=2", "--num_encoder_layers=1", "--average_checkpoints=1")
THERE = ("--device=pretended", *SMALL)
HERE = ("--device=cpu", *SMALL)
NO_CHECK = "--check=false"
UNREAD = ("--log_every=1000", NO_CHECK)
DRAWLESS = "--dropout=0.0"  # on the device, whose generator is another one
CLOSE = 1e-5  # relative, of losses after 13 steps; 5e-7 was seen
MODELS = {
    "ctc": ("hparams/ctc.yaml", "--ctc_weight=1.0", "--num_decoder_layers=0"),
    "joint": ("hparams/ctc.yaml",),
    "lobes": ("hparams/ctc_speechbrain.yaml", "--cnn_channels=8"),
}

pytestmark = SPEECHBRAINS_MASKS

Steps = list[list[str]]  # what the host waited for in each


@pytest.fixture(scope="module", autouse=True)
def _plain() -> Iterator[None]:
    """Compute attention in the same way on both devices."""
    with one_thread(), sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A release of 12 prompts: what an operation takes here, it takes for being passed on."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"), FEW)


def train_there(workplace: Workplace, run: Path, *options: str, **more: Any) -> Steps:
    """Train, and give what the host waited for in each step and between it and the one before."""
    fit_batch, to, steps = AsrBrain.fit_batch, Batch.to, Steps()

    def listened(brain: AsrBrain, batch: Batch) -> Any:
        if brain.step == 1:  # what comes before an epoch is no step
            waits.clear()
        lost = fit_batch(brain, batch)
        steps.append(waits.copy())
        waits.clear()
        return lost

    def pinned(batch: Batch, device: torch.device) -> Batch:
        with patch.object(pretended, "STAGED", 2**40):  # as if the loader had pinned it
            return to(batch, device)

    with patch.object(AsrBrain, "fit_batch", listened), patch.object(Batch, "to", pinned):
        assert workplace.train_here(run, *THERE, *UNREAD, *options, **more) == 0
    return steps


def figures(run: Path) -> list[float]:
    """List what a run logged of its losses and scores."""
    names = ("loss", "valid_loss", "CER", "WER")
    records = read_log(run / "train_log.jsonl")
    return [each[name] for each in records for name in names if name in each]


# -- the same numbers, without waiting -----------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_run_comes_to_the_losses_of_the_cpu_and_no_step_waits(
    model: str, workplace: Workplace, tmp_path: Path
) -> None:
    yaml, *options = MODELS[model]
    here, there = tmp_path / "here", tmp_path / "there"
    assert workplace.train_here(here, *HERE, *UNREAD, DRAWLESS, *options, yaml=yaml) == 0
    steps = train_there(workplace, there, DRAWLESS, *options, yaml=yaml)
    assert len(steps) >= 6
    assert steps == [[]] * len(steps)
    assert figures(there) == pytest.approx(figures(here), rel=CLOSE)
    assert read_json(there / "summary.json")["machine"]["device"] == str(DEVICE)


def test_no_step_of_mixed_precision_waits(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--precision=fp16", "--eval_precision=fp16", "--number_of_epochs=1")
    steps = train_there(workplace, tmp_path, *options)
    assert len(steps) >= 3
    assert steps == [[]] * len(steps)


def test_a_step_that_waits_is_found_out(workplace: Workplace, tmp_path: Path) -> None:
    lose = AsrBrain.compute_objectives

    def asking(brain: AsrBrain, *inputs: Any, **stage: Any) -> Any:
        loss = lose(brain, *inputs, **stage)
        assert loss.sums.sum().item() > 0
        return loss

    with patch.object(AsrBrain, "compute_objectives", asking):
        steps = train_there(workplace, tmp_path, "--number_of_epochs=1")
    assert steps == [["_local_scalar_dense"]] * len(steps) != []


# -- what else a run does ------------------------------------------------------------------------


def test_a_run_that_was_stopped_within_an_epoch_goes_on_to_the_same_digits(
    workplace: Workplace, tmp_path: Path
) -> None:
    assert workplace.train_here(tmp_path / "whole", *THERE) == 0  # with its check
    with stopped_after(4):
        assert workplace.train_here(tmp_path / "stopped", *THERE, NO_CHECK) == ASKED_TO_STOP
    assert workplace.train_here(tmp_path / "stopped", *THERE, NO_CHECK) == 0
    assert figures(tmp_path / "stopped") == figures(tmp_path / "whole")


def test_a_recipe_of_speechbrains_comes_to_its_losses(
    asterisk_english: Path, tmp_path: Path
) -> None:
    release = make_workplace(asterisk_english, tmp_path, FEWER).release
    text = speechbrain_recipe.HPARAMS.replace("dropout: 0.15", "dropout: 0.0")
    losses: dict[str, list[float]] = {"cpu": [], NAME: []}
    # The cells of a GRU are fused on accelerators, which is beyond a pretended one.
    with patch.object(speechbrain_recipe, "HPARAMS", text.replace("RNN.GRU", "RNN.RNN")):
        for device, found in losses.items():
            folder = tmp_path / device
            fewer = {"output_neurons": 22, "number_of_epochs": 1}
            hparams = speechbrain_recipe.load_recipe(release, folder, **fewer)

            class Traced(speechbrain_recipe.make_asr(sbkit.Brain)):  # type: ignore[misc]
                seen = found

                def on_stage_end(self, stage: sb.Stage, loss: float, *epoch: Any) -> None:
                    super().on_stage_end(stage, loss, *epoch)
                    self.seen.append(loss)

            speechbrain_recipe.run(Traced, hparams, {"device": device})
    assert losses[NAME] == pytest.approx(losses["cpu"], rel=1e-4)  # 2e-5 was seen
    assert len(losses[NAME]) == 3  # of training, validation and test


# -- a batch that is not finite ------------------------------------------------------------------


def test_a_bad_batch_is_named(asterisk_english: Path, tmp_path: Path) -> None:
    workplace, yaml = noisy_workplace(asterisk_english, tmp_path, FEWER), write_fragile(tmp_path)
    run = tmp_path / "run"
    assert workplace.train_here(run, *THERE, NO_CHECK, yaml=yaml) == 0
    for file in sorted((run / "nonfinite").glob("*.json")):
        assert noisy_clip(workplace).stem in file.read_text()


# -- the device itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda there: there + torch.ones(3),
        lambda there: torch.stack([there, torch.ones(3)]),
        lambda there: torch.nn.Linear(3, 3)(there),
        lambda there: there.masked_fill(torch.ones(3) > 0, 0.0),
        lambda there: torch.ones(3)[there.long()],
        lambda there: there.normal_(generator=torch.Generator()),
    ],
    ids=["add", "stack", "linear", "mask", "index", "generator"],
)
def test_the_devices_tensors_do_not_meet_those_of_the_cpu(mix: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="Expected"):
        mix(torch.ones(3, device=NAME))


@pytest.mark.parametrize(
    ("wait", "noted"),
    [
        (lambda there: there.tolist(), "copy to the host"),
        (lambda there: there[there > 0], "indexing by a mask"),
        (lambda there: there.nonzero(), "nonzero"),
        (lambda there: torch.tensor(1.0, device=there.device), "blocking copy of () to"),
        (lambda there: there.copy_(torch.ones(3)), "blocking copy of (3,) to"),
        (lambda there: torch.ones(99_999).to(there, non_blocking=True), "blocking copy of"),
        (lambda there: there[torch.tensor([0, 1])], "blocking copy of indices"),
    ],
    ids=["list", "mask", "nonzero", "number", "copy", "large", "index"],
)
def test_what_would_wait_for_it_is_noted(wait: Callable[[Tensor], object], noted: str) -> None:
    there = torch.zeros(3, device=NAME)
    waits.clear()
    wait(there)
    assert [each[: len(noted)] for each in waits] == [noted]


@pytest.mark.parametrize(
    "go_on",
    [
        lambda there: there * 2.0 + torch.tensor(1.0),
        lambda there: torch.ones(3).to(there, non_blocking=True),
        lambda there: there.index_put_((there > 0,), torch.tensor(0.0)),
        lambda there: there.sum().isfinite(),
    ],
    ids=["number", "copy", "fill", "flag"],
)
def test_what_would_not_is_not(go_on: Callable[[Tensor], object]) -> None:
    there = torch.zeros(3, device=NAME)
    waits.clear()
    go_on(there)
    assert waits == []


class Half(sbkit.Brain):
    """Use one of two modules."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> Tensor:
        scores: Tensor = self.modules["used"](batch)
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: sb.Stage) -> Tensor:
        return predictions.square().mean()


def test_an_optimizer_without_a_gradient_is_passed_over_there() -> None:
    layers = {name: torch.nn.Linear(2, 1) for name in ("used", "left")}
    before = {name: each.weight.detach().clone() for name, each in layers.items()}
    optimizers = {
        name: {"parts": [name], "opt_class": lambda each: torch.optim.SGD(each, lr=0.1)}
        for name in layers
    }
    brain = Half(layers, hparams={"optimizers": optimizers}, run_opts={"device": NAME})
    brain.fit([1], torch.utils.data.DataLoader([torch.ones(1, 2)], batch_size=None))  # type: ignore[arg-type]
    moved = [not torch.equal(before[name], each.weight.cpu()) for name, each in layers.items()]
    assert moved == [True, False]


def test_its_generators_state_comes_back_from_a_checkpoint() -> None:
    state = random_state(DEVICE)
    expected = torch.rand(4, device=NAME)
    restore_random_state(state, DEVICE)
    assert torch.equal(torch.rand(4, device=NAME), expected)
