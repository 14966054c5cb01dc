"""Curves of a run: losses, learning rate and metrics, from the records of ``train_log.jsonl``.

records -> four panels: what is drawn -> one picture, ``curves.png``, or one of each for a page
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sbkit.base.files import write_bytes_atomically
from sbkit.logs.log import Record, read_log
from sbkit.logs.metric import Metrics, base_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("blue", "orange", "green", "purple", "red", "brown", "pink", "gray", "olive", "cyan")
STYLES: Mapping[str, Mapping[str, Any]] = {
    "line": {"linewidth": 2},
    "faint": {"linewidth": 1, "alpha": 0.3},
    "marked": {"linewidth": 2, "marker": "o", "markersize": 4},
    "level": {"linewidth": 1, "linestyle": "--"},
}
DPI = 120

Style = Literal["line", "faint", "marked", "level"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve; ``color`` counts from 0.

    style: level is a horizontal line, at its only y, over the whole panel.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    style: Style = "line"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over the same axes.

    log: the y axis is logarithmic; from_zero: it begins at 0; epochs: the x axis counts epochs.
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    log: bool = False
    from_zero: bool = False
    epochs: bool = False


def run_panels(records: Iterable[Record], metrics: Metrics) -> tuple[Panel, ...]:
    """Return the training loss, the learning rate, the loss by epoch and the metrics."""
    records = list(records)
    steps, epochs, tests = (_of_kind(records, kind) for kind in ("step", "epoch", "test"))
    return (
        Panel(
            title="Training loss",
            x="step",
            y="loss (nats, log scale)",
            curves=tuple(_training_loss(steps)),
            log=True,
        ),
        Panel(
            title="Learning rate",
            x="step",
            y="learning rate (10⁻³)",
            curves=_curve(steps, "step", "learning_rate", color=2, scale=1000),
            from_zero=True,
        ),
        Panel(
            title="Loss by epoch",
            x="epoch",
            y="loss (nats)",
            curves=(
                *_curve(epochs, "epoch", "loss", label="training", style="marked"),
                *_curve(epochs, "epoch", "valid_loss", label="validation", color=1, style="marked"),
            ),
            epochs=True,
        ),
        _metrics_panel(epochs, tests, metrics),
    )


def _training_loss(steps: Sequence[Record]) -> Iterable[Curve]:
    for each in _curve(steps, "step", "loss", label="as logged", style="faint"):
        yield each
        yield _smooth(each)


def _metrics_panel(epochs: Sequence[Record], tests: Sequence[Record], metrics: Metrics) -> Panel:
    """Show every metric of the validation sets by epoch, and those of the test sets as levels."""
    latest = {test["split"]: test for test in tests}
    all_percent = all(metric.is_fraction for metric in metrics.values())
    curves: list[Curve] = []
    for number, name in enumerate(_names(epochs, metrics)):
        metric, color = metrics[base_name(name)], 3 + number
        scale = 100 if metric.is_fraction else 1
        best = min if metric.lower_is_better else max
        for each in _curve(epochs, "epoch", name, color=color, scale=scale, style="marked"):
            label = f"valid {name}, best {best(each.ys):.4g}"
            curves.append(Curve(label=label, xs=each.xs, ys=each.ys, color=color, style="marked"))
        for split, test in latest.items():
            if test.get(name) is not None:
                value = scale * test[name]
                label = f"{split} {name}, {value:.4g}"
                curves.append(Curve(label=label, xs=(), ys=(value,), color=color, style="level"))
    return Panel(
        title="Metrics",
        x="epoch",
        y=f"metric ({'%' if all_percent else 'value'})",
        curves=tuple(curves),
        from_zero=True,
        epochs=True,
    )


def _names(epochs: Sequence[Record], metrics: Metrics) -> list[str]:
    """List the metrics that were logged, in the recipe's order; those of one set follow all's."""
    logged = dict.fromkeys(name for epoch in epochs for name in epoch)
    return [
        *(name for name in metrics if name in logged),
        *(name for name in logged if name not in metrics and base_name(name) in metrics),
    ]


def _of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _curve(
    records: Iterable[Record],
    x: str,
    y: str,
    *,
    label: str = "",
    color: int = 0,
    scale: float = 1,
    style: Style = "line",
) -> tuple[Curve, ...]:
    """Pick the finite points of a curve (what was not finite was logged as null); none is none."""
    chosen = [record for record in records if record.get(y) is not None]
    xs, ys = [record[x] for record in chosen], [scale * record[y] for record in chosen]
    return (Curve(label=label, xs=xs, ys=ys, color=color, style=style),) if xs else ()


def _smooth(curve: Curve) -> Curve:
    """Average over windows of a thirtieth of the curve, each a tenth of that after the other.

    One for each point takes a time that grows with their square: 1.6 s for 100,000 of them.
    """
    xs, ys = curve.xs, curve.ys
    width = max(1, len(ys) // 30)
    starts = range(0, len(ys) - width + 1, max(1, width // 10))
    return Curve(
        label="running mean",
        xs=[xs[start + width // 2] for start in starts],
        ys=[sum(ys[start : start + width]) / width for start in starts],
        color=curve.color,
    )


def overlay(a: Panel, b: Panel) -> Panel:
    """Return a panel with the curves of two runs, each run in a colour of its own."""
    curves = [
        replace(each, label=f"{name} {each.label}".strip(), color=color)
        for color, (name, panel) in enumerate((("A", a), ("B", b)))
        for each in panel.curves
        if each.style != "faint"
    ]
    return replace(a, curves=tuple(curves))


def draw_curves(log_file: Path, png: Path, metrics: Metrics) -> None:
    """Draw the records so far."""
    panels = run_panels(read_log(log_file), metrics)
    write_bytes_atomically(png, _picture(panels, rows=2, columns=2))


def encode_panel(panel: Panel) -> str:
    """Draw one panel as PNG in base64, for a page."""
    return base64.b64encode(_picture([panel], rows=1, columns=1)).decode()


def _picture(panels: Sequence[Panel], *, rows: int, columns: int) -> bytes:
    from matplotlib.figure import Figure  # 0.7 s to import; without pyplot it is always Agg

    figure = Figure(figsize=(6 * columns, 4 * rows), dpi=DPI, layout="constrained")  # inches
    axes = figure.subplots(rows, columns, squeeze=False)
    for each, panel in zip(axes.flat, panels, strict=True):
        _draw(each, panel)
    figure.savefig(picture := io.BytesIO(), format="png")
    return picture.getvalue()


def _draw(axes: "Axes", panel: Panel) -> None:
    axes.set_title(panel.title, fontweight="bold")
    for curve in panel.curves:
        _draw_curve(axes, curve)
    if not axes.lines:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes)
        return
    _scale(axes, panel)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if any(each.label for each in panel.curves):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    style: dict[str, Any] = {
        "color": f"tab:{COLORS[curve.color % len(COLORS)]}",
        "label": curve.label,
    }
    if curve.style == "level":
        axes.axhline(curve.ys[0], **style, **STYLES["level"])
    else:
        axes.plot(curve.xs, curve.ys, **style, **STYLES[curve.style])


def _scale(axes: "Axes", panel: Panel) -> None:
    """Set the limits and ticks; of decades, 1, 2 and 5 of each as plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if panel.epochs:  # half an epoch on both sides, so that a single one stands in the middle
        epochs = [x for curve in panel.curves for x in curve.xs]
        axes.set_xlim(min(epochs, default=1) - 0.5, max(epochs, default=1) + 0.5)
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
