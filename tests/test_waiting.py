"""Within a step the host asks for no value of a tensor: on a GPU it would wait for it.

Shown on the CPU by the operations that a step calls; `test_gpu.py` shows it on a GPU.
"""

import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.asr.brain import AsrBrain
from tests.runs import Workplace, make_workplace

READING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by a mask: by its nonzero
# What is on the CPU on any machine: a seed of dropout, lengths, and a length in torchaudio.
ON_THE_HOST = {"_draw", "_compare", "_apply_sinc_resample_kernel"}
SMALL = ("--number_of_epochs=1", "--num_encoder_layers=1", "--log_every=1000", "--check=false")
MODELS = {
    "ctc": ("hparams/ctc.yaml", "--ctc_weight=1.0", "--num_decoder_layers=0"),
    "joint": ("hparams/ctc.yaml",),
    "lobes": ("hparams/ctc_speechbrain.yaml", "--cnn_channels=8"),
}


class Waits(TorchDispatchMode):
    """Note the operations whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        masks = args[1] if name in INDEXING else ()
        if name in READING or any(each is not None and each.dtype is torch.bool for each in masks):
            callers = {each.name for each in traceback.extract_stack()}
            self.found += [] if callers & ON_THE_HOST else [name]
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    counts = {"train": 9, "dev": 2, "test": 1}
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"), counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "asks"), [("joint", True), *((model, False) for model in MODELS)]
)
def test_no_step_waits(model: str, asks: bool, workplace: Workplace, tmp_path: Path) -> None:
    fit_batch, lose, steps = AsrBrain.fit_batch, AsrBrain.compute_objectives, list[list[str]]()

    def listened(brain: AsrBrain, batch: Any) -> Any:
        with Waits() as waits:
            loss = fit_batch(brain, batch)
        steps.append(waits.found)
        return loss

    def asking(brain: AsrBrain, *inputs: Any, **stage: Any) -> Any:
        loss = lose(brain, *inputs, **stage)
        assert not asks or loss.sums.sum().item() > 0
        return loss

    yaml, *options = MODELS[model]
    with (
        patch.object(AsrBrain, "fit_batch", listened),
        patch.object(AsrBrain, "compute_objectives", asking),
    ):
        assert workplace.train_here(tmp_path, *SMALL, *options, yaml=yaml) == 0
    assert steps == [["_local_scalar_dense"] if asks else []] * len(steps) != []
