"""Within a step the host never waits for the device."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipes.CommonVoice.brain import AsrBrain
from sbkit.data.batch import Batch
from tests.residence import Residence
from tests.runs import Workplace, make_workplace

STEPS = 10
OPTIONS = ("--check=false", "--number_of_epochs=2", "--log_every=1000", "--batch_seconds=4")


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A release of 24 prompts."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("waiting"))


def waits(workplace: Workplace, run: Path, *options: str) -> list[list[str]]:
    """Train, and give what the host waited for in each step, as if there were a GPU."""
    fit_batch, move, steps = AsrBrain.fit_batch, Batch.to, list[list[str]]()

    def listened(brain: AsrBrain, batch: Batch) -> Any:
        brain.device_type = "cuda"  # on the CPU the flags of a step are read at once
        residence = Residence()
        residence.settle([*brain.modules.parameters(), *brain.modules.buffers()])
        residence.settle([brain._tally])

        def moved(batch: Batch, device: torch.device) -> Batch:
            there = move(batch, device)
            residence.settle([there.audio, there.tokens, there.weights])
            return there

        with patch.object(Batch, "to", moved), residence.listening():
            lost = fit_batch(brain, batch)
        steps.append(residence.waits)
        return lost

    with patch.object(AsrBrain, "fit_batch", listened):
        assert workplace.train_here(run, *OPTIONS, *options) == 0
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--ctc_weight=1.0",), ()], ids=["ctc", "joint"])
def test_no_step_waits_for_the_device(
    options: tuple[str, ...], workplace: Workplace, tmp_path: Path
) -> None:
    steps = waits(workplace, tmp_path, *options)
    assert len(steps) >= STEPS
    assert steps == [[]] * len(steps)


def test_a_step_that_waits_is_found_out(workplace: Workplace, tmp_path: Path) -> None:
    lose = AsrBrain.compute_objectives

    def asking(brain: AsrBrain, *inputs: Any, **stage: Any) -> Any:
        loss = lose(brain, *inputs, **stage)
        assert loss.sums.sum().item() > 0
        return loss

    with patch.object(AsrBrain, "compute_objectives", asking):
        steps = waits(workplace, tmp_path, "--number_of_epochs=1")
    assert all("item" in each for each in steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_ten_steps_on_a_gpu_without_a_synchronization(
    precision: str, workplace: Workplace, tmp_path: Path
) -> None:
    fit_batch, steps = AsrBrain.fit_batch, list[int]()

    def strict(brain: AsrBrain, batch: Batch) -> Any:
        steps.append(1)
        # The first steps build what is built once: kernels, the scaler's state, the optimizer's.
        mode = "error" if 3 < len(steps) <= 3 + STEPS else "default"
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return fit_batch(brain, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    options = ("--device=cuda", f"--precision={precision}", *OPTIONS, "--number_of_epochs=4")
    with patch.object(AsrBrain, "fit_batch", strict):
        assert workplace.train_here(tmp_path, *options) == 0
    assert len(steps) > 3 + STEPS
