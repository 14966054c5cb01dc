"""A moving average of the weights: validated, saved as the model, and resumed bit for bit."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from speechbrain import Stage
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.checkpoint.checkpointer import Checkpointer
from tests.train.test_brain import LineBrain, line, loader, rows

DECAY = 0.6  # above (1 + n) / (10 + n) until step 12


class Averaging(LineBrain):
    """Note the weights after each step and in each validation."""

    def on_fit_batch_end(self, *_: Any) -> None:
        self.hparams.seen.append(self.modules["model"].weight.detach().clone())
        if self.optimizer_step == self.hparams.stop_after:
            self.signals.received = signal.SIGTERM

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage is Stage.VALID:
            self.hparams.validated.append(self.modules["model"].weight.detach().clone())
        super().on_stage_end(stage, stage_loss, epoch)


def averaging(folder: Path, *, stop_after: int = 0, decay: float = DECAY) -> Averaging:
    model, epochs = line(), EpochCounter(4)
    knobs = {"ema_decay": decay, "seen": [], "validated": [], "stop_after": stop_after}
    return Averaging(
        modules={"model": model},
        opt_class=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        hparams={**knobs, "epoch_counter": epochs},
        run_opts={"device": "cpu"},
        checkpointer=Checkpointer(folder, recoverables={"model": model, "epochs": epochs}),
    )


def fit(brain: Averaging, *, bad: int | None = None) -> None:
    inputs, targets = rows(12)
    if bad is not None:
        inputs[3 * bad] = torch.nan
    data: Any = torch.utils.data.TensorDataset(inputs, targets)
    options = {"batch_size": 3}  # a loader that saves its place
    brain.fit(brain.hparams.epoch_counter, data, loader(6, 3), train_loader_kwargs=options)


def test_it_is_validated_saved_and_tested_and_a_skipped_step_adds_nothing(tmp_path: Path) -> None:
    brain = averaging(tmp_path)
    fit(brain, bad=1)
    steps = brain.hparams.seen
    assert torch.equal(steps[0], steps[1]) and not torch.equal(steps[1], steps[2])
    average, after = steps[0].double(), []
    for number, weight in enumerate(steps, start=1):
        decay = 1.0 if number % 4 == 2 else min(DECAY, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * weight
        after.append(average.float())
    torch.testing.assert_close(brain.hparams.validated, after[3::4], atol=1e-6, rtol=0.0)
    best = brain.checkpointer.find_checkpoint(min_key="loss")
    saved = torch.load(best.paramfiles["model"], weights_only=True)["weight"]
    brain.evaluate(loader(6, 3), min_key="loss")
    for weight in (saved, brain.modules["model"].weight):
        assert any(torch.equal(weight, each) for each in brain.hparams.validated)


@pytest.mark.parametrize("stop_after", [6, 8])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, stop_after: int) -> None:
    """Within an epoch, and with its last step."""
    whole, stopped = averaging(tmp_path / "whole"), averaging(tmp_path / "stopped")
    stopped.hparams.stop_after = stop_after
    fit(whole)
    with pytest.raises(SystemExit):
        fit(stopped)
    resumed = averaging(tmp_path / "stopped")
    fit(resumed)
    for name in ("seen", "validated"):
        both = getattr(stopped.hparams, name) + getattr(resumed.hparams, name)
        assert torch.equal(torch.stack(both), torch.stack(getattr(whole.hparams, name)))
    others = (each.training_step.moving_average.others for each in (whole, resumed))
    assert all(map(torch.equal, *(each.values() for each in others)))


def test_what_does_not_learn_is_in_no_file_and_none_is_written_without(tmp_path: Path) -> None:
    brain = averaging(tmp_path / "frozen")
    brain.modules["model"].bias.requires_grad_(False)
    fit(brain)
    assert [*brain.training_step.moving_average.others] == [0]
    plain = averaging(tmp_path / "plain", decay=0.0)
    fit(plain)
    assert torch.equal(plain.hparams.validated[-1], plain.hparams.seen[-1])
    assert "moving_average" not in plain.checkpointer.recoverables
