"""Charts as SVG, for a page that may load nothing: lines, and areas on top of each other.

Colours come from the page's style, so that a chart is as dark or as light as the page. Whatever a reader of the page
cannot see is in its label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 34  # room for what is written beside the axes
POINTS_MAX = 400  # of a line: more than its pixels tell nothing
TICKS = 5

Points = Sequence[tuple[float, float]]


def thinned(points: Points, most: int = POINTS_MAX) -> list[tuple[float, float]]:
    """The means of as many neighbours as it takes."""
    each = -(-len(points) // most) if points else 1
    parts = (points[start : start + each] for start in range(0, len(points), each))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, both in them if they are round."""
    if not high > low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{sign}"
    return f"{value:.3g}"


class _Frame:
    """Where numbers lie in the picture."""

    def __init__(self, xs: Sequence[float], low: float, high: float) -> None:
        self.x0, self.x1 = min(xs), max(xs)
        pad = (high - low) * 0.05 or max(abs(high), 1.0) * 0.05
        self.y0, self.y1 = (low if low == 0 else low - pad), high + pad

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (1 - (value - self.y0) / (self.y1 - self.y0)) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str, y_name: str) -> list[str]:
        bottom = HEIGHT - BOTTOM
        parts = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
        for value in ticks(self.x0, self.x1):
            place = f'x="{self.x(value):.1f}" y="{bottom + 16}" text-anchor="middle"'
            parts.append(f"<text {place}>{short(value)}</text>")
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_name)}</text>')
        parts.append(f'<text x="4" y="11">{escape(y_name)}</text>')
        return parts


def _picture(label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def line_chart(points: Points, x_name: str, y_name: str, label: str) -> str:
    """One line; nothing where there is no point."""
    points = thinned([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
    if not points:
        return ""
    frame = _Frame([x for x, _ in points], min(y for _, y in points), max(y for _, y in points))
    parts = frame.axes(x_name, y_name)
    if len(points) == 1:
        parts.append(
            f'<circle class="c0 dot" cx="{frame.x(points[0][0]):.1f}" cy="{frame.y(points[0][1]):.1f}" r="3"/>'
        )
    else:
        parts.append(f'<path class="c0 line" d="{_path(points, frame.x, frame.y)}"/>')
    return _picture(label, parts)


def stacked_chart(series: Sequence[tuple[str, Points]], x_name: str, y_name: str, label: str) -> str:
    """Areas on top of each other, over the same x; their names are the page's to tell, in the same order."""
    layers = [thinned(points) for _, points in series]
    if not layers or not layers[0]:
        return ""
    xs = [x for x, _ in layers[0]]
    below = [0.0] * len(xs)
    shapes: list[tuple[list[float], list[float]]] = []
    for layer in layers:
        above = [low + y for low, (_, y) in zip(below, layer, strict=True)]
        shapes.append((below, above))
        below = above
    frame = _Frame(xs, 0.0, max(below))
    if len(xs) == 1:
        xs, shapes = [xs[0], xs[0]], [(low * 2, high * 2) for low, high in shapes]
    parts = []
    for number, (low, high) in enumerate(shapes):
        edge = [*zip(xs, high, strict=True), *zip(reversed(xs), reversed(low), strict=True)]
        parts.append(f'<path class="c{number} area" d="{_path(edge, frame.x, frame.y)}Z"/>')
    return _picture(label, [*parts, *frame.axes(x_name, y_name)])
