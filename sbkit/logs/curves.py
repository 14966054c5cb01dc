"""Pictures of a run: losses, learning rate and metrics, drawn from ``train_log.jsonl``."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.base.files import write_bytes_atomically
from sbkit.logs.log import read_log
from sbkit.logs.metric import Metrics
from sbkit.logs.panels import Curve, Panel, run_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("blue", "orange", "green", "purple", "red", "brown", "pink", "gray", "olive", "cyan")
STYLES: Mapping[str, Mapping[str, Any]] = {
    "line": {"linewidth": 2},
    "faint": {"linewidth": 1, "alpha": 0.3},
    "marked": {"linewidth": 2, "marker": "o", "markersize": 4},
    "level": {"linewidth": 1, "linestyle": "--"},
}


def draw_curves(log_file: Path, png: Path, metrics: Metrics) -> None:
    """Draw what the log holds so far; a panel without figures says so."""
    from matplotlib.figure import Figure  # 0.7 s to import; without pyplot it is always Agg

    figure = Figure(figsize=(12, 8), dpi=120)
    panels = run_panels(read_log(log_file), metrics)
    # A layout that matplotlib computes draws everything twice: 0.5 s in place of 0.25.
    bottom = 0.08 + 0.03 * max(-(-len(panel.curves) // 2) for panel in panels)
    places = {"left": 0.07, "right": 0.98, "bottom": bottom, "top": 0.95, "hspace": 0.42}
    for axes, panel in zip(figure.subplots(2, 2, gridspec_kw=places).flat, panels, strict=True):
        _draw(axes, panel)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes_atomically(png, picture.getvalue())


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
    if len(axes.lines) > 1:
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
