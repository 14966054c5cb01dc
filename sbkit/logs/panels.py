"""The panels of a run's curves, from the records of ``train_log.jsonl``: what is drawn, not how."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sbkit.logs.log import Record
from sbkit.logs.metric import Metrics, base_name

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
    """Average over a window of a thirtieth of the curve."""
    xs, ys = curve.xs, curve.ys
    width = max(1, len(ys) // 30)
    starts = range(len(ys) - width + 1)
    middle = width // 2
    return Curve(
        label="running mean",
        xs=xs[middle : middle + len(starts)],
        ys=[sum(ys[i : i + width]) / width for i in starts],
        color=curve.color,
    )
