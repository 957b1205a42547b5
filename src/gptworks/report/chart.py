"""A chart of several curves as SVG, drawn once with a linear and once with a logarithmic scale where that makes sense.

Which of the two is seen, and which runs are, is decided by the page's style alone, so a reader without JavaScript has
the same choices. Hovering needs the values, which the page carries beside the drawing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gptworks.report.thinning import Points
from gptworks.report.words import both
from gptworks.train import plot

WIDTH, HEIGHT = 720, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 12, 16, 40
_FEWEST_WITHOUT_DOTS = 40  # points; of fewer each is seen
_FLAT = 1e-3  # of its height: a curve that varies less gets an axis that does not magnify it


@dataclass(frozen=True)
class Curve:
    """`run`: its number, which is its colour. `kind`: raw, smooth or mark, how the line looks."""

    label: str
    run: int
    points: Points
    kind: str = "smooth"


@dataclass(frozen=True)
class Flag:
    """A step that something is to be said of; it stands at the top of the chart."""

    run: int
    step: float
    text: str


@dataclass(frozen=True)
class Axis:
    """A range of values and the round numbers in it, on a scale of pixels."""

    ticks: list[float]
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where the value lies between the ends, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def svg(curves: list[Curve], *, title: str, is_log: bool, flags: Sequence[Flag] = ()) -> str:
    """`title`: for those who cannot see it."""
    xs = [x for curve in curves for x, _ in curve.points] + [flag.step for flag in flags]
    ys = [y for curve in curves for _, y in curve.points]
    x_axis = linear_axis(0.0, max(xs))
    y_axis = log_axis(min(ys), max(ys)) if is_log else linear_axis(min(ys), max(ys))
    parts = [
        f'<svg class="{"log" if is_log else "linear"}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" data-x="{x_axis.low:g} {x_axis.high:g}" '
        f'data-box="{_LEFT} {_TOP} {WIDTH - _RIGHT} {HEIGHT - _BOTTOM}">'
    ]
    parts += _grid(x_axis, y_axis)
    parts += [_line(curve, x_axis, y_axis) for curve in curves]
    parts += [_flag(flag, x_axis) for flag in flags]
    parts.append(f'<line class="at" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" x1="-9" x2="-9"/></svg>')
    return "".join(parts)


def can_be_log(curves: list[Curve]) -> bool:
    """Not where there is a value that is not positive, nor where all are about the same."""
    ys = [y for curve in curves for _, y in curve.points]
    return min(ys) > 0 and max(ys) > 1.5 * min(ys)


def _place(x: float, y: float, x_axis: Axis, y_axis: Axis) -> tuple[float, float]:
    across = _LEFT + x_axis.share(x) * (WIDTH - _LEFT - _RIGHT)
    down = _TOP + (1 - y_axis.share(y)) * (HEIGHT - _TOP - _BOTTOM)
    return round(across, 1), round(down, 1)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        _, y = _place(x_axis.low, tick, x_axis, y_axis)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:g}" x2="{WIDTH - _RIGHT}" y2="{y:g}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{written(tick)}</text>')
    for tick in x_axis.ticks:
        x, _ = _place(tick, y_axis.low, x_axis, y_axis)
        parts.append(f'<text x="{x:g}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{written(tick)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="step" x="{middle:g}" y="{HEIGHT - 4}" text-anchor="middle">{both("step", "tspan")}</text>'
    )
    return parts


def _line(curve: Curve, x_axis: Axis, y_axis: Axis) -> str:
    places = [_place(x, y, x_axis, y_axis) for x, y in curve.points]
    style = f'class="curve {curve.kind} run-{curve.run}"'
    dots = curve.points if curve.kind == "mark" or len(curve.points) < _FEWEST_WITHOUT_DOTS else []
    marks = "".join(f'<circle cx="{x:g}" cy="{y:g}" r="3"/>' for (x, y), _ in zip(places, dots, strict=False))
    drawn = " ".join(f"{x:g},{y:g}" for x, y in places)
    return f'<g {style}><polyline points="{drawn}"/>{marks}</g>'


def _flag(flag: Flag, x_axis: Axis) -> str:
    x = round(_LEFT + x_axis.share(flag.step) * (WIDTH - _LEFT - _RIGHT), 1)
    return (
        f'<g class="curve run-{flag.run}"><title>{escape(flag.text)}</title>'
        f'<path class="flag" d="M{x:g} {_TOP + 9}l-5 -9h10z"/></g>'
    )


def linear_axis(low: float, high: float) -> Axis:
    """Round numbers that enclose the range, about six of them; of a flat curve a tenth of its height."""
    if high - low <= _FLAT * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 20, high + abs(high) / 20) if low or high else (0.0, 1.0)
    ticks = plot.ticks(low, high)
    return Axis(ticks, ticks[0], ticks[-1])


def log_axis(low: float, high: float) -> Axis:
    """1, 2 and 5 times powers of ten where few powers are needed, else powers alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, (last - first) // 6)
    ticks = [m * 10.0**power for power in range(first, last + 1, every) for m in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    below = max((tick for tick in ticks if tick <= low), default=10.0**first)
    above = min((tick for tick in ticks if tick >= high), default=10.0**last)
    ticks = [below, *[tick for tick in inside if below < tick < above], above]
    return Axis(ticks, below, above, is_log=True)


def written(value: float) -> str:
    """1,500 rather than 1500; 12k, 3.4M where the number is long; 2e-05 where it is small."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:,.6g}" if size >= 1000 else f"{value:.6g}"
