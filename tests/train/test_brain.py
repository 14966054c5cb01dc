"""The Brain keeps SpeechBrain's ways, and is exact where SpeechBrain's is not."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speechbrain import Stage
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from sbkit.base.errors import SbkitError, StopRequestedError
from sbkit.bundle.task import Task
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.models.loss import Loss
from sbkit.train.brain import training_loss
from sbkit.train.nonfinite import memory_errors
from sbkit.train.stopping import FIT_SECONDS
from tests import processes
from tests.runs import records_of
from tests.train.lines import LineBrain, brain_of, line, loader, rows
from tools.prove_resume import differences


def test_one_norm_clips_every_parameter_group() -> None:
    first, second = line(), line()
    brain = LineBrain(
        modules={"model": nn.Sequential(first), "other": second},
        opt_class=lambda parameters: torch.optim.SGD(
            [{"params": first.parameters()}, {"params": second.parameters()}], lr=1.0
        ),
        run_opts={"device": "cpu", "max_grad_norm": 0.1},
    )
    brain.compute_forward = lambda batch, stage: second(first(batch[0]) @ torch.ones(2, 3))
    before = nn.utils.parameters_to_vector(brain.modules.parameters()).detach()
    brain.fit(range(1), loader(4, 4))
    after = nn.utils.parameters_to_vector(brain.modules.parameters()).detach()
    assert torch.linalg.vector_norm(after - before).item() == pytest.approx(0.1, rel=1e-4)


class SavingBrain(LineBrain):
    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def saving_brain(folder: Path, model: nn.Module, epochs: EpochCounter) -> SavingBrain:
    checkpointer = Checkpointer(folder, recoverables={"model": model, "epochs": epochs})
    brain: SavingBrain = brain_of(SavingBrain, model=model, checkpointer=checkpointer)
    return brain


def test_evaluation_keeps_counters_of_whole_run(tmp_path: Path) -> None:
    model, epochs = line(), EpochCounter(4)
    brain = saving_brain(tmp_path, model, epochs)
    brain.fit(epochs, loader(12, 3), loader(6, 3))
    best = brain.checkpointer.find_checkpoint(min_key="loss")
    brain.evaluate(loader(6, 3), min_key="loss")
    assert brain.optimizer_step == 16
    saved = torch.load(best.paramfiles["model"], weights_only=True)
    assert torch.equal(model.weight, saved["weight"])


def test_untrained_model_of_a_task_is_not_evaluated(tmp_path: Path) -> None:
    for checkpointer, text in (
        (None, "has neither trained nor a `checkpointer`. Call `fit`"),
        (Checkpointer(tmp_path), f"{tmp_path} has no checkpoint, so nothing can be tested yet"),
    ):
        brain = brain_of(LineBrain, hparams={"recipe": Task()}, checkpointer=checkpointer)
        with pytest.raises(SbkitError, match=re.escape(text)):
            brain.evaluate(loader(6, 3))
    untrained: Any = brain_of(LineBrain)  # of a script, which may have loaded its weights itself
    assert untrained.evaluate(loader(6, 3)) > 0


def test_training_loss_after_a_validation_has_dropout() -> None:
    brain = brain_of(LineBrain, model=nn.Sequential(line(), nn.Dropout(0.5)))
    brain.modules.eval()
    batch = rows(50)
    losses = [training_loss(brain, batch).sums.sum() for _ in range(2)]
    assert losses[0] != losses[1]


def test_nonfinite_loss_with_finite_gradient_skips_step() -> None:
    class Infinite(LineBrain):
        def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Stage) -> Loss:
            return Loss(predictions.sum(1) + torch.inf, torch.ones(len(predictions)))

    brain = brain_of(Infinite, nonfinite_patience=3)
    brain.fit(range(1), loader(12, 4))
    assert torch.equal(brain.modules["model"].weight, line().weight)


def test_nonfinite_count_survives_stop_within_epoch(tmp_path: Path) -> None:
    inputs, targets = rows(12)
    inputs[::2] = torch.nan  # every second step is bad, of twelve
    bad = DataLoader(TensorDataset(inputs, targets), batch_size=1)
    exits = []
    for _ in range(2):  # four bad steps, then two
        brain = saving_brain(tmp_path, line(), epochs := EpochCounter(1))
        brain.nonfinite_patience = 4

        def leave(*_: Any, brain: Any = brain) -> None:
            brain.stopping.signals.received = signal.SIGTERM if brain.optimizer_step == 8 else None

        brain.on_fit_batch_end = leave
        with pytest.raises((KeyboardInterrupt, SbkitError)) as exited:
            brain.fit(epochs, bad)
        exits.append(exited.type)
    assert exits == [StopRequestedError, SbkitError]
    assert "In 5 steps of this epoch" in str(exited.value)
    assert "`nonfinite_patience` allows 4" in str(exited.value)


MORTAL = """
import os, signal, sys
from pathlib import Path
import torch
from speechbrain.utils.epoch_loop import EpochCounter
from sbkit.bundle.task import Task
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.distributed.ranks import process_group
from sbkit.train.schedule import WarmupCosine
from tests.train.lines import LineBrain, brain_of, line, loader

class Mortal(LineBrain):
    def _fit_valid(self, valid_set, epoch, show_progress):
        if epoch not in (3, 5):
            super()._fit_valid(valid_set, epoch, show_progress)

    def evaluate_batch(self, batch, stage):
        if self.hparams.epoch_counter.current in self.hparams.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate_batch(batch, stage)

folder, *dies_in = sys.argv[1:]
with process_group(torch.device("cpu")):
    model, epochs = line(), EpochCounter(5)
    parts = {"model": model, "epochs": epochs}
    settings = {"output_folder": folder, "epoch_counter": epochs, "dies_in": [*map(int, dies_in)]}
    settings |= {"lr": 0.3, "lr_schedule": WarmupCosine(warmup_fraction=0.1), "log_every": 1}
    settings |= {"average_checkpoints": 2}
    checkpointer = Checkpointer(Path(folder) / "checkpoints", recoverables=parts)
    brain = brain_of(Mortal, model=model, hparams=settings, checkpointer=checkpointer)
    brain.fit(epochs, loader(12, 3), loader(6, 3))
"""


@pytest.mark.ddp
def test_run_killed_in_validation_keeps_the_epoch_and_ends_as_if_it_was_not(tmp_path: Path) -> None:
    """The rate follows the position in the run, and a validation ranks its epoch.

    The recipe leaves out the validations of two epochs, of which the last is validated anyhow.
    """
    for name, epochs in {"whole": [""], "killed": ["1", "4", "5", ""]}.items():
        for dies_in in epochs:
            command = ["-c", MORTAL, tmp_path / name, *dies_in]
            process = processes.run(command, ranks=2)
            assert process.returncode == (-signal.SIGKILL if dies_in else 0), process.stderr
            saved = Checkpointer(tmp_path / name / "checkpoints").find_checkpoints()
            assert saved[0].meta["end-of-epoch"] is (dies_in == "")
    assert not differences(tmp_path / "killed", tmp_path / "whole")
    folders = (tmp_path / name / "checkpoints" for name in ("whole", "killed"))
    whole, killed = (Checkpointer(folder).find_checkpoints() for folder in folders)
    validated = [record["epoch"] for record in records_of(tmp_path / "killed", "epoch")]
    assert validated == [1, 2, 4, 5]
    times = {"unixtime": 0, FIT_SECONDS: 0}
    assert [c.meta | times for c in whole] == [c.meta | times for c in killed]
    rates = {record["learning_rate"] for record in records_of(tmp_path / "whole", "step")}
    assert len(rates) > 2


# -- mixed precision -------------------------------------------------------------------------------


def scaled_brain(init_scale: float) -> Any:
    """Make a Brain with a scaler that works, as in fp16 on a GPU."""
    brain = brain_of(LineBrain, max_grad_norm=0.5, nonfinite_patience=0)
    brain.scaler = GradScaler("cpu", init_scale=init_scale)
    return brain


def test_scaled_steps_equal_unscaled_steps() -> None:
    scaled, plain = scaled_brain(1024.0), brain_of(LineBrain, max_grad_norm=0.5)
    for brain in (scaled, plain):
        brain.fit(range(3), loader(12, 4))
    torch.testing.assert_close(scaled.modules["model"].weight, plain.modules["model"].weight)


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    """The batch is not counted as bad, because its loss is finite."""
    brain = scaled_brain(3e38)  # any gradient overflows
    brain.fit(range(1), loader(12, 12))
    assert torch.equal(brain.modules["model"].weight, line().weight)
    assert brain.training_metrics.of_epoch.skipped_steps == 1
    assert brain.nonfinite_count == 0
    assert brain.scaler.get_scale() == pytest.approx(1.5e38)


def test_batch_that_exceeds_the_memory_is_named() -> None:
    batch = SimpleNamespace(id=["a", "b", "c", "d"])
    with pytest.raises(SbkitError, match=r"\(a, b, c and 1 more\).*memory"), memory_errors(batch):
        raise torch.OutOfMemoryError
