"""Curves are drawn before, during and after a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.base.files import to_json
from sbkit.logs import curves
from sbkit.logs.curves import LOSS, RATE, VALIDATION, curves_of, draw_curves, draw_png
from sbkit.logs.metric import Metric
from sbkit.logs.run_log import EpochFigures, SplitFigures, StepFigures

STEPS = [
    StepFigures(epoch=1, step=step, loss=9 / step, learning_rate=1e-3, rtfx=200, data_wait_share=0)
    for step in range(1, 100)
]
UNVALIDATED = EpochFigures(epoch=1, step=99, loss=1.0, rtfx=200.0)
VALIDATED = replace(UNVALIDATED, epoch=2, valid_loss=1.2, metrics={"CER": 0.3, "WER": 0.7})
DIVERGED = replace(STEPS[-1], step=100, loss=float("nan"))
TEST = SplitFigures(
    epoch=2, step=99, split="test", metrics={"CER": 0.25, "WER": 0.625}, decoder="beam"
)
METRICS = {"CER": Metric(), "WER": Metric()}


def labels_of(*figures: StepFigures | EpochFigures | SplitFigures) -> dict[str, list[str]]:
    """Return the labels of the curves by the title of their panel."""
    labels: dict[str, list[str]] = {}
    for curve in curves_of([item.as_record() for item in figures], METRICS):
        labels.setdefault(curve.panel, []).append(curve.label)
    return labels


def test_panels(tmp_path: Path) -> None:
    assert labels_of() == {}
    assert labels_of(*STEPS, DIVERGED, UNVALIDATED).keys() == {LOSS, RATE, VALIDATION}
    labels = labels_of(*STEPS, UNVALIDATED, VALIDATED, TEST)
    assert labels[VALIDATION] == ["training", "validation"]
    assert "valid CER (greedy), best 30 %" in labels[curves.METRICS]
    assert "test WER (beam), 62.5 %" in labels[curves.METRICS]
    parts = {"grad_norm": 3.0, "ctc": 1.0}
    logged = [replace(STEPS[0], logged=parts), replace(VALIDATED, logged={**parts, "valid_ctc": 2})]
    labels = labels_of(*logged)
    assert labels[curves.GRADIENTS] == ["grad_norm"]
    assert labels[curves.LOGGED] == ["ctc", "valid_ctc"]
    log, png = tmp_path / "train_log.jsonl", tmp_path / "curves.png"
    for figures in ([], [*STEPS, DIVERGED, UNVALIDATED, VALIDATED, TEST]):
        log.write_text("".join(to_json(item.as_record()) + "\n" for item in figures))
        draw_curves(log, png, METRICS)
        assert png.read_bytes().startswith(b"\x89PNG")


def test_running_mean_of_curve() -> None:
    records = [{"kind": "step", "step": step, "loss": float(step % 2)} for step in range(6000)]
    raw, mean = curves_of(records, METRICS)
    assert (len(raw.ys), len(mean.ys), mean.xs[0], mean.xs[-1]) == (6000, 5801, 100, 5900)
    assert mean.ys == pytest.approx([0.5] * 5801)


@pytest.mark.filterwarnings("error")
def test_negative_figures_are_drawn() -> None:
    epoch = replace(VALIDATED, loss=-4.0, metrics={"gain": -2.0})
    records = [figures.as_record() for figures in (replace(STEPS[0], loss=-4.0), epoch)]
    gain = {"gain": Metric(lower_is_better=False, unit="dB")}
    assert [*curves_of(records, gain)][-1].label == "valid gain, best -2 dB"
    assert draw_png(records, gain)
