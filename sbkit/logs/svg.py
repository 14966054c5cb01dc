"""Panels of curves as coordinates of an SVG, which the pages of reports draw."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbkit.logs.panels import Curve, Panel, Style

WIDTH, HEIGHT = 460, 250  # units of the SVG
LEFT, RIGHT, TOP, BOTTOM = 46, 452, 10, 210  # of the area within the axes
MOST_POINTS = 400  # of a curve: more cannot be told apart in so many units


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark of an axis: where it is, in units, and what it says."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve in units, as the attribute `points` of a polyline."""

    label: str
    points: str
    style: Style
    color: int


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A panel in units; without lines nothing was logged."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class _Axis:
    """A range of values, and the units of its two ends."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the units of a value, to a tenth."""
        low, high, value = (self._scaled(each) for each in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> tuple[Tick, ...]:
        values = _decades(self.low, self.high) if self.log else _round(self.low, self.high)
        return tuple(Tick(at=self.at(each), text=f"{each:g}") for each in values)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def draw_panel(panel: Panel) -> Drawing:
    """Place the curves of a panel, and the ticks of its axes."""
    curves = [_drawable(each, panel) for each in panel.curves]
    xs = [x for each in curves for x in each.xs]
    ys = [y for each in curves for y in each.ys]
    if not ys:
        return Drawing(title=panel.title, x="", y="", lines=(), x_ticks=(), y_ticks=())
    margin = 0.5 if panel.epochs else 0.0
    low, high = min(xs, default=1) - margin, max(xs, default=1) + margin
    x_axis = _Axis(low, max(high, low + 1), LEFT, RIGHT)
    least, most = (0.0 if panel.from_zero else min(ys)), max(ys)
    room = most / least if panel.log else most - least or 1.0
    most = most * room**0.05 if panel.log else most + 0.05 * room
    y_axis = _Axis(least, most if most > least else least * 2 or 1.0, BOTTOM, TOP, panel.log)
    whole = (each for each in x_axis.ticks() if "." not in each.text)  # steps and epochs
    return Drawing(
        title=panel.title,
        x=panel.x,
        y=panel.y,
        lines=tuple(_line(each, x_axis, y_axis) for each in curves),
        x_ticks=tuple(whole),
        y_ticks=y_axis.ticks(),
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


def _drawable(curve: Curve, panel: Panel) -> Curve:
    """Thin a curve out, and leave out what has no place on a logarithmic axis."""
    step = math.ceil(len(curve.xs) / MOST_POINTS) or 1
    if curve.style == "level":
        return curve
    pairs = [*zip(curve.xs, curve.ys, strict=True)]
    kept = [pair for pair in [*pairs[::step], pairs[-1]] if pair[1] > 0 or not panel.log]
    return replace(curve, xs=[x for x, _ in kept], ys=[y for _, y in kept])


def _line(curve: Curve, x_axis: _Axis, y_axis: _Axis) -> Line:
    xs: Sequence[float] = [x_axis.low, x_axis.high] if curve.style == "level" else curve.xs
    ys: Sequence[float] = [*curve.ys] * 2 if curve.style == "level" else curve.ys
    points = " ".join(f"{x_axis.at(x):g},{y_axis.at(y):g}" for x, y in zip(xs, ys, strict=True))
    return Line(label=curve.label, points=points, style=curve.style, color=curve.color)


def _round(low: float, high: float) -> list[float]:
    """Return three to seven round numbers in a range."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.99)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of every decade in a range, or round numbers where that is one at most."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    values = (each * 10.0**power for power in range(first, last + 1) for each in (1, 2, 5))
    inside = [each for each in values if low <= each <= high]
    return inside if len(inside) > 1 else [each for each in _round(low, high) if each > 0]
