"""The loss curve of a run as an SVG file, and as a few lines of text."""

import math
from html import escape
from pathlib import Path
from typing import TypeVar

from gptworks import run_paths
from gptworks.train import metrics

NAME = run_paths.LOSS_CURVE
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 420, 74, 40, 20, 48
_SMOOTHED = "training, smoothed"
_COLOURS = {"training": "#1f77b4", _SMOOTHED: "#1f77b4", "held-out": "#d62728"}
_FEWEST_TO_SMOOTH = 30  # points; fewer show their course themselves
_BLOCKS = "▁▂▃▄▅▆▇█"

Points = list[tuple[int, float]]
X = TypeVar("X", int, float)


def curves(run: Path) -> dict[str, Points]:
    curves_of: dict[str, Points] = {"training": [], "held-out": []}
    for entry in metrics.read(run):
        for label, key in (("training", "loss"), ("held-out", "held_out_loss")):
            if isinstance(entry.get(key), float):
                curves_of[label].append((entry["step"], entry[key]))
    return {label: _thinned(points) for label, points in curves_of.items() if points}


def _thinned(points: Points) -> Points:
    """At most 1,000 of them and the last: no picture shows more."""
    every = -(-len(points) // 1000)
    return points[::every] if points[-1] in points[::every] else [*points[::every], points[-1]]


def write(run: Path) -> None:
    points_of = curves(run)
    if points_of:
        (run / NAME).write_text(svg(points_of, title=f"loss of {run.name}"), encoding="utf-8")


def svg(points_of: dict[str, Points], title: str) -> str:
    points = [point for curve in points_of.values() for point in curve]
    x_ticks = ticks(0, max(step for step, _ in points))
    y_ticks = ticks(min(loss for _, loss in points), max(loss for _, loss in points))
    x_low, x_high = 0.0, max(x_ticks[-1], 1.0)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (step - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (y_high - loss) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        _, y = place(0, tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_low)
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{tick:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
    parts.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
        "loss (nats per token)</text>"
    )
    drawn = _with_smoothed(points_of)
    for number, (label, curve) in enumerate(drawn.items()):
        is_pale = label == "training" and _SMOOTHED in drawn
        parts += _curve([place(*point) for point in curve], label, number, is_pale=is_pale)
    return "\n".join([*parts, "</svg>", ""])


def _curve(points: list[tuple[float, float]], label: str, number: int, *, is_pale: bool) -> list[str]:
    """A line, with a mark at each evaluation, and its line in the legend."""
    colour, width = _COLOURS[label], 1.0 if is_pale else 1.8
    stroke = f'stroke="{colour}" stroke-width="{width}"' + (' stroke-opacity="0.35"' if is_pale else "")
    line = " ".join(f"{x},{y}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" {stroke}/>']
    if label == "held-out":
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
    x, y = _WIDTH - _RIGHT - 150, _TOP + 16 + 18 * number
    parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" {stroke}/>')
    return [*parts, f'<text x="{x + 28}" y="{y}">{label}</text>']


def _with_smoothed(points_of: dict[str, Points]) -> dict[str, Points]:
    """In the order in which they are drawn; the mean of a window over the training losses, where there are many."""
    training = points_of.get("training", [])
    if len(training) < _FEWEST_TO_SMOOTH:
        return points_of
    means = smoothed(training, len(training))
    return {"training": training, _SMOOTHED: means} | {k: v for k, v in points_of.items() if k != "training"}


def smoothed(points: list[tuple[X, float]], most: int) -> list[tuple[X, float]]:
    """The mean over a fortieth of the curve on either side, at `most` of its points or fewer, and at the last."""
    reach = max(2, len(points) // 40)
    every: int = -(-len(points) // most)
    means: list[tuple[X, float]] = []
    for number in sorted({*range(0, len(points), every), len(points) - 1}):
        ahead = min(reach, number)  # no further than back: the first losses fall fast
        window = [loss for _, loss in points[number - ahead : number + ahead + 1]]
        means.append((points[number][0], sum(loss / len(window) for loss in window)))
    return means


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose the range, about six of them."""
    span = max(high - low, 1e-6 * abs(high), 1e-9)  # of a curve that is flat, or a single point
    power = 10.0 ** math.floor(math.log10(span / 5))
    size = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= 6)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [float(f"{n * size:.10g}") for n in range(first, max(last, first + 1) + 1)]


def text(run: Path, width: int = 60) -> str:
    """One line of blocks, for a terminal."""
    points = curves(run).get("training", [])
    if not points:
        return "no losses yet"
    losses = [loss for _, loss in points]
    columns = min(width, len(losses))
    means = []
    for column in range(columns):
        piece = losses[column * len(losses) // columns : (column + 1) * len(losses) // columns]
        means.append(sum(piece) / len(piece))
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / max(high - low, 1e-9)
    bar = "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
    return f"loss {losses[0]:.2f} {bar} {losses[-1]:.2f}"
