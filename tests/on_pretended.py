"""Runs on a stand-in for a GPU; `test_waiting.py` runs this in a process of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.asr.recipe import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP
from sbkit.checkpoint.rng import random_state, restore_random_state
from sbkit.data.batch import Batch
from sbkit.distributed.device import Placement
from sbkit.logs.run_log import read_log
from tests import pretended
from tests.pretended import DEVICE, NAME, waits
from tests.runs import Workplace, last_parameters, make_workplace, one_thread, stopped_after
from tests.test_run import SPEECHBRAINS_MASKS

FEW = {"train": 9, "dev": 2, "test": 1}
SMALL = ("--number_of_epochs=2", "--num_encoder_layers=1", "--average_checkpoints=1")
THERE = ("--device=pretended", *SMALL)
UNREAD = ("--log_every=1000", "--check=false")
FP16 = ("--precision=fp16", "--eval_precision=fp16")
STREAMING = "hparams/ctc_streaming.yaml"  # which draws the size of its chunks
MODELS = {
    "joint": ("hparams/ctc.yaml",),
    "lobes": ("hparams/ctc_speechbrain.yaml", "--cnn_channels=8"),
    "streaming": (STREAMING, "--ctc_weight=1.0", "--num_decoder_layers=0"),
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
    """Return a release of 12 prompts: the stand-in is slower than the CPU."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"), FEW)


def train_there(workplace: Workplace, run: Path, *options: str, **more: Any) -> Steps:
    """Train; return what the host waited for in each step and between it and the one before."""
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

    def scaler(placement: Placement) -> GradScaler:  # of a scale that no step overflows
        return GradScaler(NAME, init_scale=64.0, enabled=placement.precision == "fp16")

    with (
        patch.object(AsrBrain, "fit_batch", listened),
        patch.object(Batch, "to", pinned),
        patch.object(Placement, "grad_scaler", scaler),
    ):
        assert workplace.train_here(run, *THERE, *UNREAD, *options, **more) == 0
    return steps


def losses(run: Path) -> list[float]:
    """List what a run logged of its losses."""
    records = read_log(run / "train_log.jsonl")
    return [each[name] for each in records for name in ("loss", "valid_loss") if name in each]


@pytest.mark.parametrize(
    ("model", "precision", "close"),  # relative, after 6 steps
    [*((model, (), 1e-5) for model in MODELS), ("joint", FP16, 5e-3)],
)
def test_a_run_has_the_losses_of_the_cpu_and_no_step_waits(
    model: str, precision: tuple[str, ...], close: float, workplace: Workplace, tmp_path: Path
) -> None:
    yaml, *options = MODELS[model]
    options.append("--dropout=0.0")  # the device has another generator
    here, there = tmp_path / "here", tmp_path / "there"
    assert workplace.train_here(here, *SMALL, *UNREAD, *options, yaml=yaml) == 0
    steps = train_there(workplace, there, *options, *precision, yaml=yaml)
    assert len(steps) >= 6
    assert steps == [[]] * len(steps)
    assert losses(there) == pytest.approx(losses(here), rel=close)


def test_a_step_that_waits_is_found_out(workplace: Workplace, tmp_path: Path) -> None:
    lose = AsrBrain.compute_objectives

    def asking(brain: AsrBrain, *inputs: Any, **stage: Any) -> Any:
        loss = lose(brain, *inputs, **stage)
        assert loss.sums.sum().item() > 0
        return loss

    with patch.object(AsrBrain, "compute_objectives", asking):
        steps = train_there(workplace, tmp_path, "--number_of_epochs=1")
    assert steps == [["_local_scalar_dense"]] * len(steps) != []


@pytest.mark.parametrize(
    ("yaml", "precision"),
    [("hparams/ctc.yaml", FP16), (STREAMING, ())],
    ids=["fp16", "streaming"],
)
def test_a_run_that_was_stopped_within_an_epoch_goes_on_to_the_same_digits(
    yaml: str, precision: tuple[str, ...], workplace: Workplace, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = (*THERE, *precision)
    assert workplace.train_here(whole, *options, yaml=yaml) == 0  # with its check
    with stopped_after(4):
        assert workplace.train_here(stopped, *options, yaml=yaml) == ASKED_TO_STOP
    assert workplace.train_here(stopped, *options, yaml=yaml) == 0
    assert losses(stopped) == losses(whole)
    expected = last_parameters(whole)
    assert all(torch.equal(expected[name], each) for name, each in last_parameters(stopped).items())


def test_its_generators_state_comes_back_from_a_checkpoint() -> None:
    state = random_state(DEVICE)
    expected = torch.rand(4, device=NAME)
    restore_random_state(state, DEVICE)
    assert torch.equal(torch.rand(4, device=NAME), expected)


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


def test_what_would_wait_for_it_is_noted_and_nothing_else() -> None:
    there = torch.zeros(3, device=NAME)
    noted: dict[str, Callable[[], object]] = {
        "copy to the host": there.tolist,
        "copy to the": lambda: torch.ones(3).copy_(there),
        "indexing by a mask": lambda: there[there > 0],
        "nonzero": there.nonzero,
        "blocking copy of () to": lambda: torch.tensor(1.0, device=NAME),
        "blocking copy of (3,) to": lambda: there.copy_(torch.ones(3)),
        "blocking copy of (99999,)": lambda: torch.ones(99_999).to(there, non_blocking=True),
        "blocking copy of indices": lambda: there[torch.tensor([0, 1])],
    }
    for words, wait in noted.items():
        waits.clear()
        wait()
        assert [each[: len(words)] for each in waits] == [words]
    waits.clear()
    assert (there * 2.0 + torch.tensor(1.0)).sum().isfinite().shape == ()
    torch.ones(3).to(there, non_blocking=True)
    there.index_put_((there > 0,), torch.tensor(0.0))
    assert waits == []
