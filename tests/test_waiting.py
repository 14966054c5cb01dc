"""Within a step the host never waits for the device: shown on a GPU, or on a pretended one."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipes.asr.brain import AsrBrain
from sbkit.data.batch import Batch
from tests import processes
from tests.runs import Workplace, make_workplace

STEPS = 10
OPTIONS = ("--check=false", "--number_of_epochs=4", "--log_every=1000", "--batch_seconds=4")


@pytest.mark.slow
def test_all_that_a_pretended_accelerator_shows() -> None:
    there = "ignore:Module already imported"  # plugins are there, before pytest looks at them
    command = ["-m", "pytest", "-q", "--show-capture=no", "-W", there, "tests/on_pretended.py"]
    done = processes.run(command, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A release of 24 prompts."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("waiting"))


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

    with patch.object(AsrBrain, "fit_batch", strict):
        options = ("--device=cuda", f"--precision={precision}", *OPTIONS)
        assert workplace.train_here(tmp_path, *options) == 0
    assert len(steps) > 3 + STEPS
