"""Draw the curves of a run from ``train_log.jsonl`` as PNG."""

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.base.files import write_bytes_atomically
from sbkit.logs.metric import Metrics, base_name
from sbkit.logs.run_log import FIGURE_NAMES, GRAD_NORM, SOURCE_LOSS, VALID, Record, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

LOSS, RATE, VALIDATION, METRICS = "Training loss", "Learning rate", "Loss at validation", "Metrics"
GRADIENTS, LOGGED = "Gradient norm", "Parts of the loss, and what else is logged"
AXES = {  # x and y of each panel
    LOSS: ("step", "loss"),
    RATE: ("step", "learning rate (10⁻³)"),
    VALIDATION: ("step", "loss"),
    METRICS: ("step", "metric"),
    GRADIENTS: ("step", "norm before clipping"),
    LOGGED: ("step", "mean"),
}
OPTIONAL_PANELS = (GRADIENTS, LOGGED)  # left out if they have no curves
COLORS = ("blue", "orange", "green", "purple", "red", "brown", "pink", "gray", "olive", "cyan")
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2},
    "faint": {"linewidth": 1, "alpha": 0.3},
    "marked": {"linewidth": 2, "marker": "o", "markersize": 4},
    "level": {"linewidth": 1, "linestyle": "--"},  # horizontal, over the whole panel
}
CURVES = "curves.png"  # the curves of a run


@dataclass(frozen=True)
class Curve:
    """One curve of a panel; ``color`` is an index into COLORS."""

    panel: str
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    style: str


def curves_of(records: Sequence[Record], metrics: Metrics) -> Iterator[Curve]:
    """Yield the training loss, the learning rate, the loss at validation and the metrics."""
    steps, validations = _select(records, "step"), _select(records, "epoch")
    for xs, ys in _points(steps, "step", "loss"):
        yield Curve(LOSS, "as logged", xs, ys, 0, "faint")
        yield Curve(LOSS, "running mean", *_smooth(xs, ys), 0, "line")
    for xs, ys in _points(steps, "step", "learning_rate", scale=1000):
        yield Curve(RATE, "", xs, ys, 2, "line")
    for color, (name, label) in enumerate((("loss", "training"), ("valid_loss", "validation"))):
        for xs, ys in _points(validations, "step", name):
            yield Curve(VALIDATION, label, xs, ys, color, "marked")
    sources = {name: None for record in records for name in record if name.startswith(SOURCE_LOSS)}
    for color, name in enumerate(sources, start=2):
        source = name.removeprefix(SOURCE_LOSS)
        for xs, ys in _points(steps, "step", name):
            yield Curve(LOSS, source, *_smooth(xs, ys), color, "line")
        for xs, ys in _points(validations, "step", name):
            yield Curve(VALIDATION, f"training, {source}", xs, ys, color, "marked")
    yield from _logged_curves(steps, validations)
    tests = {test["split"]: test for test in _select(records, "test")}  # the last of each split
    decoders = {split: test.get("decoder") for split, test in tests.items()}
    # A validation decodes greedily.
    validation_decoder = " (greedy)" if any(decoders.values()) else ""
    logged_names = dict.fromkeys(name for figures in validations for name in figures)
    set_names = [
        name for name in logged_names if name not in metrics and base_name(name) in metrics
    ]
    names = [*(name for name in metrics if name in logged_names), *set_names]
    for color, name in enumerate(names, start=3):
        metric = metrics[base_name(name)]
        scale, unit = (100, " %") if metric.is_fraction else (1, f" {metric.unit}".rstrip())
        for xs, ys in _points(validations, "step", name, scale=scale):
            label = f"valid {name}{validation_decoder}"
            if metric.lower_is_better is None:
                label += f", last {ys[-1]:.4g}{unit}"
            else:
                best = min(ys) if metric.lower_is_better else max(ys)
                label += f", best {best:.4g}{unit}"
            yield Curve(METRICS, label, xs, ys, color, "marked")
        for split, test in tests.items():
            if test.get(name) is not None:
                value = scale * test[name]
                decoder = f" ({decoders[split]})" if decoders[split] else ""
                label = f"{split} {name}{decoder}, {value:.4g}{unit}"
                yield Curve(METRICS, label, (), [value], color, "level")


def _logged_curves(steps: Sequence[Record], validations: Sequence[Record]) -> Iterator[Curve]:
    """Yield the gradient norms, and the figures logged by name in training and in validations."""
    valid_names = [name for record in validations for name in record if name.startswith(VALID)]
    names = [name for record in steps for name in record if not name.startswith(SOURCE_LOSS)]
    names += [name.removeprefix(VALID) for name in valid_names]
    logged_names = dict.fromkeys(name for name in names if name not in FIGURE_NAMES)
    for color, name in enumerate(logged_names):
        panel = GRADIENTS if name.startswith(GRAD_NORM) else LOGGED
        for xs, ys in _points(steps, "step", name):
            yield Curve(panel, name, *_smooth(xs, ys), color, "line")
        for xs, ys in _points(validations, "step", f"{VALID}{name}"):
            yield Curve(panel, f"{VALID}{name}", xs, ys, color, "marked")


def _select(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _points(
    records: Sequence[Record], x: str, y: str, *, scale: float = 1
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the points of a curve, if there are any; non-finite values were logged as null."""
    finite = [record for record in records if record.get(y) is not None]
    if finite:
        yield [record[x] for record in finite], [scale * record[y] for record in finite]


def _smooth(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average over windows of one thirtieth of the curve."""
    width = max(1, len(ys) // 30)
    means = np.convolve(ys, np.full(width, 1 / width), mode="valid")
    return list(xs[width // 2 :][: len(means)]), means.tolist()


def write_picture(png: Path, draw: Callable[[], bytes]) -> None:
    """Write the PNG that ``draw`` returns; do nothing without matplotlib."""
    if can_draw():
        write_bytes_atomically(png, draw())


@cache
def can_draw() -> bool:
    """Return whether matplotlib is installed; if not, log once that pictures are left out."""
    if find_spec("matplotlib") is None:
        logger.info("No pictures without matplotlib: pip install 'sbkit[curves]' adds them.")
        return False
    return True


def draw_curves(log_file: Path, png: Path, metrics: Metrics) -> None:
    """Draw the curves of a run so far."""
    write_picture(png, lambda: draw_png(read_log(log_file), metrics))


def draw_png(records: Sequence[Record], metrics: Metrics) -> bytes:
    """Draw the panels as PNG, two in a row."""
    from matplotlib.figure import Figure  # takes 0.7 s; without pyplot, the backend is Agg

    curves = [*curves_of(records, metrics)]
    used_panels = {curve.panel for curve in curves}
    titles = [title for title in AXES if title in used_panels or title not in OPTIONAL_PANELS]
    num_rows = -(-len(titles) // 2)
    figure = Figure(figsize=(12, 4 * num_rows), dpi=120, layout="constrained")  # inches
    panels = {t: figure.add_subplot(num_rows, 2, i) for i, t in enumerate(titles, 1)}
    for curve in curves:
        axes = panels[curve.panel]
        style = {"color": f"tab:{COLORS[curve.color % len(COLORS)]}", **STYLES[curve.style]}
        if curve.style == "level":
            axes.axhline(curve.ys[0], label=curve.label, **style)
        else:
            axes.plot(curve.xs, curve.ys, label=curve.label, **style)
    for title, axes in panels.items():
        _finish(axes, title)
    figure.savefig(png := io.BytesIO(), format="png")
    return png.getvalue()


def _finish(axes: "Axes", title: str) -> None:
    """Write title, axes and legend; the log axis of a loss has labels at 1, 2 and 5 of each decade.

    A loss that is not always positive, such as SI-SNR or ELBO, has a linear axis.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.set_title(title, fontweight="bold")
    if not axes.lines:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes)
        return
    x, y = AXES[title]
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    lowest = min(min(np.atleast_1d(line.get_ydata())) for line in axes.lines)
    if title in (LOSS, *OPTIONAL_PANELS) and lowest > 0:
        axes.set(yscale="log", ylabel=f"{y} (log scale)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif title in (RATE, METRICS) and lowest >= 0:
        axes.set_ylim(bottom=0)
    if title != RATE or len(axes.lines) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
