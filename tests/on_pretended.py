"""Runs on a pretended accelerator; `test_waiting.py` runs this in another process."""

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
from sbkit.audio.augment import make_colored
from sbkit.base.errors import ASKED_TO_STOP
from sbkit.base.units import SAMPLE_RATE
from sbkit.checkpoint.rng import random_state, restore_random_state
from sbkit.data.batch import Batch
from sbkit.distributed.device import Placement
from tests import pretended
from tests.pretended import DEVICE, NAME, waits
from tests.runs import (
    Workplace,
    last_parameters,
    losses_of,
    make_workplace,
    one_thread,
    stopped_after,
)
from tests.test_run import SPEECHBRAINS_MASKS

CLIP_COUNTS = {"train": 9, "dev": 2, "test": 1}
SMALL = ("--number_of_epochs=2", "--num_encoder_layers=1", "--average_checkpoints=1")
ON_DEVICE = ("--device=pretended", *SMALL)
NO_LOG = ("--log_every=1000", "--check=false")
FP16 = ("--precision=fp16", "--eval_precision=fp16")
STREAMING = "hparams/ctc_streaming.yaml"  # training draws the chunk size
MODELS = {
    "joint": ("hparams/ctc.yaml",),
    "lobes": ("hparams/ctc_speechbrain.yaml", "--cnn_channels=8"),
    "streaming": (STREAMING, "--ctc_weight=1.0", "--num_decoder_layers=0"),
}

pytestmark = SPEECHBRAINS_MASKS

Steps = list[list[str]]  # the waits of each step


@pytest.fixture(scope="module", autouse=True)
def _same_attention() -> Iterator[None]:
    """Compute attention the same way on both devices."""
    with one_thread(), sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a release of only 12 prompts: the pretended accelerator is slower than the CPU."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"), CLIP_COUNTS)


def train_on_device(workplace: Workplace, run: Path, *options: str, **yaml: str) -> Steps:
    """Train; return the waits of each step, counted from the end of the previous step."""
    fit_batch, to, steps = AsrBrain.fit_batch, Batch.to, Steps()

    def fit_batch_and_record(brain: AsrBrain, batch: Batch) -> Any:
        if brain.step == 1:  # the start of an epoch may wait
            waits.clear()
        loss = fit_batch(brain, batch)
        steps.append(waits.copy())
        waits.clear()
        return loss

    def move_as_pinned(batch: Batch, device: torch.device) -> Batch:
        with patch.object(pretended, "MAX_STAGED_BYTES", 2**40):
            return to(batch, device)

    def scaler(placement: Placement) -> GradScaler:
        """Start with a scale at which no step overflows."""
        return GradScaler(NAME, init_scale=64.0, enabled=placement.precision == "fp16")

    with (
        patch.object(AsrBrain, "fit_batch", fit_batch_and_record),
        patch.object(Batch, "to", move_as_pinned),
        patch.object(Placement, "grad_scaler", scaler),
    ):
        assert workplace.train_here(run, *ON_DEVICE, *NO_LOG, *options, **yaml) == 0
    return steps


@pytest.mark.parametrize(
    ("model", "precision", "tolerance"),  # relative, after 6 steps
    [*((model, (), 1e-5) for model in MODELS), ("joint", FP16, 5e-3)],
)
def test_run_has_the_losses_of_the_cpu_and_no_step_waits(
    model: str, precision: tuple[str, ...], tolerance: float, workplace: Workplace, tmp_path: Path
) -> None:
    yaml, *options = MODELS[model]
    options.append("--dropout=0.0")  # the device has its own random generator
    on_cpu, on_device = tmp_path / "on_cpu", tmp_path / "on_device"
    make_colored(SAMPLE_RATE, torch.empty(0, device=NAME).device)  # noise is copied once
    assert workplace.train_here(on_cpu, *SMALL, *NO_LOG, *options, yaml=yaml) == 0
    steps = train_on_device(workplace, on_device, *options, *precision, yaml=yaml)
    assert len(steps) >= 6
    assert steps == [[]] * len(steps)
    assert losses_of(on_device) == pytest.approx(losses_of(on_cpu), rel=tolerance)


def test_step_that_waits_is_noticed(workplace: Workplace, tmp_path: Path) -> None:
    compute_objectives = AsrBrain.compute_objectives

    def compute_and_read(brain: AsrBrain, *inputs: Any, **stage: Any) -> Any:
        loss = compute_objectives(brain, *inputs, **stage)
        assert loss.sums.sum().item() > 0
        return loss

    with patch.object(AsrBrain, "compute_objectives", compute_and_read):
        steps = train_on_device(workplace, tmp_path, "--number_of_epochs=1")
    assert steps == [["_local_scalar_dense"]] * len(steps) != []


@pytest.mark.parametrize(
    ("yaml", "precision"), [("hparams/ctc.yaml", FP16), (STREAMING, ())], ids=["fp16", "streaming"]
)
def test_run_stopped_within_an_epoch_resumes_to_the_same_digits(
    yaml: str, precision: tuple[str, ...], workplace: Workplace, tmp_path: Path
) -> None:
    uninterrupted, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    options = (*ON_DEVICE, *precision)
    assert workplace.train_here(uninterrupted, *options, yaml=yaml) == 0  # with its check
    with stopped_after(4):
        assert workplace.train_here(stopped, *options, yaml=yaml) == ASKED_TO_STOP
    assert workplace.train_here(stopped, *options, yaml=yaml) == 0
    assert losses_of(stopped) == losses_of(uninterrupted)
    resumed, expected = last_parameters(stopped), last_parameters(uninterrupted)
    assert all(torch.equal(expected[name], value) for name, value in resumed.items())


def test_generator_of_the_device_is_restored() -> None:
    state = random_state(DEVICE)
    expected = torch.rand(4, device=NAME)
    restore_random_state(state, DEVICE)
    assert torch.equal(torch.rand(4, device=NAME), expected)


@pytest.mark.parametrize(
    "mix",
    [
        lambda tensor: tensor + torch.ones(3),
        lambda tensor: torch.stack([tensor, torch.ones(3)]),
        lambda tensor: torch.nn.Linear(3, 3)(tensor),
        lambda tensor: tensor.masked_fill(torch.ones(3) > 0, 0.0),
        lambda tensor: torch.ones(3)[tensor.long()],
        lambda tensor: tensor.normal_(generator=torch.Generator()),
    ],
    ids=["add", "stack", "linear", "mask", "index", "generator"],
)
def test_tensors_of_both_devices_cannot_be_mixed(mix: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="Expected"):
        mix(torch.ones(3, device=NAME))


def test_only_operations_that_would_wait_are_recorded() -> None:
    tensor = torch.zeros(3, device=NAME)
    operations: dict[str, Callable[[], object]] = {
        "copy to the host": tensor.tolist,
        "copy to the": lambda: torch.ones(3).copy_(tensor),
        "indexing by a mask": lambda: tensor[tensor > 0],
        "nonzero": tensor.nonzero,
        "blocking copy of () to": lambda: torch.tensor(1.0, device=NAME),
        "blocking copy of (3,) to": lambda: tensor.copy_(torch.ones(3)),
        "blocking copy of (99999,)": lambda: torch.ones(99_999).to(tensor, non_blocking=True),
        "blocking copy of indices": lambda: tensor[torch.tensor([0, 1])],
    }
    for words, wait in operations.items():
        waits.clear()
        wait()
        assert [reason[: len(words)] for reason in waits] == [words]
    waits.clear()
    assert (tensor * 2.0 + torch.tensor(1.0)).sum().isfinite().shape == ()
    torch.ones(3).to(tensor, non_blocking=True)
    tensor.index_put_((tensor > 0,), torch.tensor(0.0))
    assert waits == []
