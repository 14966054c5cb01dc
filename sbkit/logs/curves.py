"""Curves of a run, or of two over each other: the records of ``train_log.jsonl`` as a picture.

HTML pages that hold all they need: one file each, which loads nothing.

Results, comparisons and data reports share one template, one style and one script. jinja2 escapes
what comes from data, and a policy (CSP) forbids every request and every other script and style.
"""

import base64
import hashlib
import io
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np

from sbkit.base.files import to_json, write_bytes_atomically
from sbkit.logs.metric import Metrics, base_name
from sbkit.logs.run_log import Record, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, RATE, BY_EPOCH, METRICS = "Training loss", "Learning rate", "Loss by epoch", "Metrics"
AXES = {  # of each panel, x and y
    LOSS: ("step", "loss"),
    RATE: ("step", "learning rate (10⁻³)"),
    BY_EPOCH: ("epoch", "loss"),
    METRICS: ("epoch", "metric"),
}
COLORS = ("blue", "orange", "green", "purple", "red", "brown", "pink", "gray", "olive", "cyan")
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2},
    "faint": {"linewidth": 1, "alpha": 0.3},
    "marked": {"linewidth": 2, "marker": "o", "markersize": 4},
    "level": {"linewidth": 1, "linestyle": "--"},  # horizontal, over the whole panel
}
DPI = 120


class Curve(NamedTuple):
    """One curve of a panel; ``color`` counts from 0."""

    panel: str
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    style: str


def curves_of(records: Sequence[Record], metrics: Metrics) -> Iterator[Curve]:
    """Yield the training loss, the learning rate, the loss by epoch and the metrics."""
    steps, epochs = (_of_kind(records, kind) for kind in ("step", "epoch"))
    for xs, ys in _points(steps, "step", "loss"):
        yield Curve(LOSS, "as logged", xs, ys, 0, "faint")
        yield Curve(LOSS, "running mean", *_smooth(xs, ys), 0, "line")
    for xs, ys in _points(steps, "step", "learning_rate", scale=1000):
        yield Curve(RATE, "", xs, ys, 2, "line")
    for color, (name, label) in enumerate((("loss", "training"), ("valid_loss", "validation"))):
        for xs, ys in _points(epochs, "epoch", name):
            yield Curve(BY_EPOCH, label, xs, ys, color, "marked")
    tests = {test["split"]: test for test in _of_kind(records, "test")}  # the latest of each
    decoders = {split: test.get("decoder") for split, test in tests.items()}
    greedily = " (greedy)" if any(decoders.values()) else ""  # as every epoch is validated
    for color, name in enumerate(_names(epochs, metrics), start=3):
        metric = metrics[base_name(name)]
        scale, unit = (100, " %") if metric.is_fraction else (1, f" {metric.unit}".rstrip())
        best = min if metric.lower_is_better else max
        for xs, ys in _points(epochs, "epoch", name, scale=scale):
            label = f"valid {name}{greedily}, best {best(ys):.4g}{unit}"
            yield Curve(METRICS, label, xs, ys, color, "marked")
        for split, test in tests.items():
            if test.get(name) is not None:
                value = scale * test[name]
                how = f" ({decoders[split]})" if decoders[split] else ""
                label = f"{split} {name}{how}, {value:.4g}{unit}"
                yield Curve(METRICS, label, (), [value], color, "level")


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _names(epochs: Sequence[Record], metrics: Metrics) -> list[str]:
    """List the metrics that were logged, in the recipe's order; those of one set follow all's."""
    logged = dict.fromkeys(name for epoch in epochs for name in epoch)
    return [
        *(name for name in metrics if name in logged),
        *(name for name in logged if name not in metrics and base_name(name) in metrics),
    ]


def _points(
    records: Sequence[Record], x: str, y: str, *, scale: float = 1
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the finite points of a curve (what was not finite was logged as null), if any."""
    chosen = [record for record in records if record.get(y) is not None]
    if chosen:
        yield [record[x] for record in chosen], [scale * record[y] for record in chosen]


def _smooth(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average over windows of a thirtieth of the curve."""
    width = max(1, len(ys) // 30)
    means = np.convolve(ys, np.full(width, 1 / width), mode="valid")
    return list(xs[width // 2 :][: len(means)]), means.tolist()


def draw_curves(log_file: Path, png: Path, metrics: Metrics) -> None:
    """Draw the records so far."""
    write_bytes_atomically(png, picture([read_log(log_file)], metrics))


def encode_curves(runs: Sequence[Sequence[Record]], metrics: Metrics) -> str:
    """Draw runs as PNG in base64, for a page; nothing where nothing was trained."""
    trained = [each for each in runs if each]
    return base64.b64encode(picture(trained, metrics)).decode() if trained else ""


def picture(runs: Sequence[Sequence[Record]], metrics: Metrics) -> bytes:
    """Draw the four panels as PNG; of two runs, A and B, each has a colour of its own."""
    from matplotlib.figure import Figure  # 0.7 s to import; without pyplot it is always Agg

    figure = Figure(figsize=(12, 8), dpi=DPI, layout="constrained")  # inches
    panels = dict(zip(AXES, figure.subplots(2, 2).flat, strict=True))
    for number, records in enumerate(runs):
        for curve in curves_of(records, metrics):
            if len(runs) == 1:
                _draw(panels[curve.panel], curve)
            elif curve.style != "faint":
                label = f"{'AB'[number]} {curve.label}".strip()
                _draw(panels[curve.panel], curve._replace(label=label, color=number))
    for title, axes in panels.items():
        _finish(axes, title)
    figure.savefig(drawn := io.BytesIO(), format="png")
    return drawn.getvalue()


def _draw(axes: "Axes", curve: Curve) -> None:
    style = {"color": f"tab:{COLORS[curve.color % len(COLORS)]}", **STYLES[curve.style]}
    if curve.style == "level":
        axes.axhline(curve.ys[0], label=curve.label, **style)
    else:
        axes.plot(curve.xs, curve.ys, label=curve.label, **style)


def _finish(axes: "Axes", title: str) -> None:
    """Write title, axes and legend; on the log axis 1, 2 and 5 of each decade as plain numbers.

    A loss that is not always positive, as SI-SNR or ELBO, has a linear axis.
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
    if title == LOSS and lowest > 0:
        axes.set(yscale="log", ylabel="loss (log scale)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif title in (RATE, METRICS) and lowest >= 0:
        axes.set_ylim(bottom=0)
    if title != RATE or len(axes.lines) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


FOLDER = "pages"  # beside this file
OPTIONAL = {  # what a page may show, and its value where it does not
    "notes": (),
    "runs": (),
    "names": (),
    "sections": (),
    "slices": {},
    "curves": "",
    "pictures": {},
    "known": None,
    "compared": None,
    "facts": None,
    "players": {},
    "data": {"sets": {}, "runs": 0, "byWords": True},
}


def render_page(*, title: str, **content: object) -> str:
    """Fill in the template; sections without content are left out."""
    style, code = _read("page.css"), _read("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(code)}; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {"title": title, "policy": policy, "style": style, "code": code}
    return _template().render(OPTIONAL | content, **values)


@cache
def _template() -> jinja2.Template:
    """Compile the template once: a run writes two pages."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sbkit.logs", FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies |= {"json.dumps_function": to_json, "json.dumps_kwargs": {}}
    return environment.get_template("page.html.j2")


def _read(name: str) -> str:
    return files("sbkit.logs").joinpath(FOLDER, name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
