"""Pictures of a run: losses, learning rate and metrics, drawn from ``train_log.jsonl``."""

import io
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.base.files import write_bytes_atomically
from sbkit.logs.log import Record, read_log
from sbkit.logs.metric import Metrics, base_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[list[float], list[float]]  # xs, ys

TRAINING, VALID, RATE = "tab:blue", "tab:orange", "tab:green"
METRICS = ("tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan")


def draw_curves(log_file: Path, png: Path, metrics: Metrics) -> None:
    """Draw what the log holds so far; a panel without figures says so."""
    from matplotlib.figure import Figure  # 0.7 s to import; without pyplot it is always Agg
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = read_log(log_file)
    steps, epochs, tests = (_of_kind(records, kind) for kind in ("step", "epoch", "test"))
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)  # inches
    figure = Figure(figsize=(12, 8), dpi=120, layout=layout)
    panels = figure.subplots(2, 2)
    _draw_training_loss(panels[0, 0], steps)
    _draw_learning_rate(panels[0, 1], steps)
    _draw_epoch_losses(panels[1, 0], epochs)
    _draw_metrics(panels[1, 1], epochs, tests, metrics)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes_atomically(png, picture.getvalue())


def _draw_training_loss(axes: "Axes", steps: Sequence[Record]) -> None:
    points = _points(steps, "step", "loss")
    _curve(axes, points, "as logged", color=TRAINING, alpha=0.3, linewidth=1)
    _curve(axes, _smooth(points), "running mean", color=TRAINING)
    _scale_log(axes)
    _finish(axes, title="Training loss", x="step", y="loss (nats, log scale)")


def _draw_learning_rate(axes: "Axes", steps: Sequence[Record]) -> None:
    _curve(axes, _points(steps, "step", "learning_rate", scale=1000), color=RATE)
    axes.set_ylim(bottom=0)
    _finish(axes, title="Learning rate", x="step", y="learning rate ($10^{-3}$)")


def _draw_epoch_losses(axes: "Axes", epochs: Sequence[Record]) -> None:
    _curve(axes, _points(epochs, "epoch", "loss"), "training", color=TRAINING, marker="o")
    _curve(axes, _points(epochs, "epoch", "valid_loss"), "validation", color=VALID, marker="o")
    _widen(axes, epochs)
    _finish(axes, title="Loss by epoch", x="epoch", y="loss (nats)")


def _draw_metrics(
    axes: "Axes", epochs: Sequence[Record], tests: Sequence[Record], metrics: Metrics
) -> None:
    """Draw every metric of the validation sets by epoch, and those of the test sets as lines."""
    colors = cycle(METRICS)
    latest = {test["split"]: test for test in tests}
    unit = "%" if all(metric.is_fraction for metric in metrics.values()) else "value"
    for name in _names(epochs, metrics):
        metric, color = metrics[base_name(name)], next(colors)
        points = _points(epochs, "epoch", name, scale=100 if metric.is_fraction else 1)
        best = min if metric.lower_is_better else max
        label = f"valid {name}" + (f", best {best(points[1]):.4g}" if points[1] else "")
        _curve(axes, points, label, color=color, marker="o")
        for split, test in latest.items():
            if test.get(name) is not None:
                value = (100 if metric.is_fraction else 1) * test[name]
                label = f"{split} {name}, {value:.4g}"
                axes.axhline(value, label=label, color=color, linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    _widen(axes, epochs)
    _finish(axes, title="Metrics", x="epoch", y=f"metric ({unit})")


def _names(epochs: Sequence[Record], metrics: Metrics) -> list[str]:
    """List the metrics that were logged, in the recipe's order; those of one set follow all's."""
    logged = dict.fromkeys(name for epoch in epochs for name in epoch)
    return [
        *(name for name in metrics if name in logged),
        *(name for name in logged if name not in metrics and base_name(name) in metrics),
    ]


def _of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _points(records: Iterable[Record], x: str, y: str, *, scale: float = 1) -> Points:
    """Pick the finite points of a curve (what was not finite was logged as null)."""
    chosen = [record for record in records if record.get(y) is not None]
    return [record[x] for record in chosen], [scale * record[y] for record in chosen]


def _smooth(points: Points) -> Points:
    """Average over a window of a thirtieth of the curve."""
    xs, ys = points
    width = max(1, len(ys) // 30)
    starts = range(len(ys) - width + 1)
    middle = width // 2
    return xs[middle : middle + len(starts)], [sum(ys[i : i + width]) / width for i in starts]


def _curve(axes: "Axes", points: Points, label: str = "", **style: Any) -> None:
    if points[0]:
        axes.plot(*points, label=label, **{"linewidth": 2, "markersize": 4} | style)


def _scale_log(axes: "Axes") -> None:
    """Show decades, with 1, 2 and 5 of each as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if axes.lines:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _widen(axes: "Axes", epochs: Sequence[Record]) -> None:
    """Leave half an epoch on both sides, so that a single one stands in the middle."""
    if epochs:
        axes.set_xlim(epochs[0]["epoch"] - 0.5, epochs[-1]["epoch"] + 0.5)


def _finish(axes: "Axes", *, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontweight="bold")
    if not axes.lines:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes)
        return
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(axes.lines) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
