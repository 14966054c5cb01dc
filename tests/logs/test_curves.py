"""Curves are drawn before, during and after a run."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase

from sbkit.base.files import to_json
from sbkit.logs.curves import curves_of, draw_curves, draw_png
from sbkit.logs.metric import Metric
from sbkit.logs.run_log import EpochFigures, SplitFigures, StepFigures

STEPS = [
    StepFigures(epoch=1, step=step, loss=9 / step, learning_rate=1e-3, rtfx=200, data_wait_share=0)
    for step in range(1, 100)
]
UNVALIDATED = EpochFigures(epoch=1, step=99, loss=1.0, rtfx=200.0)
VALIDATED = EpochFigures(
    epoch=2, step=99, loss=1.0, rtfx=200.0, valid_loss=1.2, metrics={"CER": 0.3, "WER": 0.7}
)
DIVERGED = replace(STEPS[-1], step=100, loss=float("nan"))
TEST = SplitFigures(
    epoch=2, step=99, split="test", metrics={"CER": 0.25, "WER": 0.625}, decoder="beam"
)
METRICS = {"CER": Metric(), "WER": Metric()}

Labels = dict[str, list[str]]


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> Labels:
    """Collect the labels of the drawn curves by the title of their panel."""
    panels: Labels = {}
    draw = Axes.draw

    def record_and_draw(axes: Axes, renderer: RendererBase) -> None:
        panels[axes.get_title()] = [str(line.get_label()) for line in axes.lines]
        draw(axes, renderer)

    monkeypatch.setattr(Axes, "draw", record_and_draw)
    return panels


LOSSES = ["as logged", "running mean"]
ERROR_RATES = [
    *("valid CER (greedy), best 30 %", "test CER (beam), 25 %"),
    *("valid WER (greedy), best 70 %", "test WER (beam), 62.5 %"),
]


def test_panels(tmp_path: Path, labels: Labels) -> None:
    log, png = tmp_path / "train_log.jsonl", tmp_path / "curves.png"
    both = ["training", "validation"]
    parts = {"grad_norm": 3.0, "ctc": 1.0}
    logged = [replace(STEPS[0], logged=parts), replace(VALIDATED, logged={**parts, "valid_ctc": 2})]
    for figures, expected in (
        ([], [[], [], [], []]),
        ([*STEPS, DIVERGED, UNVALIDATED], [LOSSES, [""], ["training"], []]),
        ([*STEPS, UNVALIDATED, VALIDATED, TEST], [LOSSES, [""], both, ERROR_RATES]),
        ([*logged, TEST], [LOSSES, [""], both, ERROR_RATES, ["grad_norm"], ["ctc", "valid_ctc"]]),
    ):
        log.write_text("".join(to_json(item.as_record()) + "\n" for item in figures))
        draw_curves(log, png, METRICS)
        drawn = [[label.removeprefix("_child0") for label in labels[title]] for title in labels]
        assert drawn == expected
        assert struct.unpack(">II", png.read_bytes()[16:24]) == (1440, 240 * len(expected))


def test_running_mean_of_curve() -> None:
    records = [{"kind": "step", "step": step, "loss": float(step % 2)} for step in range(6000)]
    raw, mean = curves_of(records, METRICS)
    assert (len(raw.ys), len(mean.ys), mean.xs[0], mean.xs[-1]) == (6000, 5801, 100, 5900)
    assert mean.ys == pytest.approx([0.5] * 5801)


@pytest.mark.filterwarnings("error")
def test_negative_figures_are_drawn(labels: Labels, monkeypatch: pytest.MonkeyPatch) -> None:
    bottoms = list[object]()
    monkeypatch.setattr(Axes, "set_ylim", lambda axes, **limits: bottoms.append(axes.get_title()))
    epoch = replace(VALIDATED, loss=-4.0, metrics={"gain": -2.0})
    records = [figures.as_record() for figures in (replace(STEPS[0], loss=-4.0), epoch)]
    draw_png(records, {"gain": Metric(lower_is_better=False, unit="dB")})
    assert labels["Metrics"] == ["valid gain, best -2 dB"]
    assert bottoms == ["Learning rate"]
