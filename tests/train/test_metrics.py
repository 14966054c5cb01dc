"""Loss and speed of a run are added up."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from speechbrain import Stage
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from sbkit.base.errors import ConfigError
from sbkit.logs.run_log import Record
from sbkit.models.loss import Loss
from sbkit.train.metrics import Meter, TrainingMetrics
from sbkit.train.step import as_losses
from tests.runs import records_of
from tests.train.lines import LineBrain, batches, brain_of, line, rows

CPU = torch.device("cpu")


def test_meter_adds_small_sums_exactly() -> None:
    meter = Meter(CPU)
    meter.add(Loss(torch.tensor([2.0**24]), torch.tensor([1])), 0.0)
    for _ in range(100):
        meter.add(Loss(torch.tensor([1.0]), torch.tensor([1])), 0.0)
    assert meter.read().sums["loss"][0] == 2**24 + 100  # float32 would have stayed at 2**24


def test_gradient_norm_of_a_step_counts_once_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a start on two ranks would weigh double in the mean of a resumed epoch."""
    metrics = TrainingMetrics(CPU)
    for ranks in (1, 2):
        monkeypatch.setattr("sbkit.train.metrics.world_size", lambda: ranks)  # noqa: B023
        for _ in range(ranks):  # each of them logs the norm
            norm = torch.tensor(3.0 * ranks)
            metrics.log_gradients({"": norm}, GradScaler(enabled=False), by_optimizer=False)
    monkeypatch.setattr("sbkit.train.metrics.world_size", lambda: 1)
    assert metrics.meter.read().sums["grad_norm"] == (9.0, 2.0)


def test_meter_separates_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slow_batches() -> Iterator[int]:
        for number in range(3):
            now[0] += 4.0
            yield number

    meter = Meter(CPU)
    for _ in meter.timed(slow_batches()):
        meter.add(Loss(torch.ones(1), torch.ones(1)), 10.0)
        now[0] += 1.0
    assert list(meter.timed(iter([]))) == []
    reading = meter.read()
    assert (reading.waiting_seconds, reading.wall_seconds) == (12.0, 15.0)
    assert (reading.rtfx, reading.data_wait_share) == (2.0, 0.8)


class LoggingBrain(LineBrain):
    """Log a part of the loss, figures of its own, and a picture."""

    factor = 1.0
    reads = False

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Loss:
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("rows", len(predictions))
        self.log("first", predictions[:, 0], len(predictions))
        if self.reads:
            self.log("last", predictions[-1, 0].item())
        parts = {"half": (loss.sums / 2, loss.counts)}
        return replace(loss, sums=self.factor * loss.sums, parts=parts)

    def on_fit_batch_end(self, *_: Any) -> None:
        self.log_figure("line", Figure())


def test_parts_figures_and_gradient_norms_are_logged(tmp_path: Path) -> None:
    history: list[Record] = []
    brain = brain_of(LoggingBrain, hparams={"output_folder": str(tmp_path), "log_every": 1})
    brain.on_epoch = history.append
    brain.fit([1], batches(1), batches(3))
    model, (inputs, targets) = line(), rows(2)
    (model(inputs) - targets).square().sum(1).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    (step,) = records_of(tmp_path, "step")
    assert step["grad_norm"] == pytest.approx(float(norm))
    for record in (step, *history):
        assert (record["rows"], record["half"]) == (2, pytest.approx(record["loss"] / 2))
    assert history[0]["valid_half"] == pytest.approx(history[0]["valid_loss"] / 2)
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["line-1.png"]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "valid_x", "source_loss/x"])
def test_name_of_the_log_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` cannot be logged"):
        brain_of().log(name, 1.0)


@pytest.mark.parametrize(
    ("scale", "factor", "sentence"),
    [
        (2.0**-12, 1.0, "the gradient scale has fallen to 2.4e-04"),
        (2.0**127, 2.0**70, "10 of the last 10 steps were skipped"),
    ],
)
def test_fp16_that_cannot_work_is_told_once(
    scale: float, factor: float, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    brain = brain_of(LoggingBrain)
    brain.scaler, brain.factor = GradScaler("cpu", init_scale=scale), factor
    brain.fit([1], batches(60))
    assert [m for m in caplog.messages if "precision: bf16" in m] == [
        f"{sentence}. Set `precision: bf16`, or lower `lr`."
    ]


class FlaggedSGD(SGD):
    """Read on the device whether a step is skipped, as fused optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        self.found_inf = None
        return super().step(closure)


def test_step_never_waits_for_the_device() -> None:
    """What the host would have to read does not exist on torch's device meta."""
    brain, device = brain_of(LoggingBrain, optimizer=FlaggedSGD), torch.device("meta")
    brain.modules.to(device)
    brain.device, brain.device_type = device, device.type
    brain.training_metrics = TrainingMetrics(device)
    brain.init_optimizers()

    def step() -> None:
        objective = brain.fit_batch([columns.to(device) for columns in rows(2)])
        brain.training_metrics.add(as_losses(objective), 1.0, None)

    for brain.step in (1, 2, 3):
        step()
    brain.reads = True
    with pytest.raises(RuntimeError, match="meta tensors"):
        step()
