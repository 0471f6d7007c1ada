"""A plot of several curves: as SVG for a page, and in characters for a terminal."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from megaconv.commands.views.svg import WIDTH, drawn, text
from megatron_lite.commands.curves import MOST_POINTS, Curve, Plot
from megatron_lite.loop.curve import axis, row_of, thinned

HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 76, 30, 30, 50
"""Room around the curves, for the labels."""
COLOURS = 6
"""Colours of the style sheet; further runs take them again."""
MARKS = "•+xo*#%@"
ASCII_MARKS = ".+xo*#%@"
FEW = 40
"""Curves with at most so many points show each of them."""


def number(value: float) -> str:
    """Format a value of an axis or a table."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.4g}"


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers from low to high."""
    rough = (high - low) / wanted or 1.0
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]


class Axes:
    """The scales of a plot."""

    def __init__(self, plot: Plot) -> None:
        self.first, self.last = plot.steps
        low, high = plot.range
        margin = (high - low or abs(high) or 1.0) * 0.05
        # A value that is never negative keeps its zero, if zero is near.
        self.low = 0.0 if 0 <= low < 0.4 * high else low - margin
        self.high = high + margin

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def drawing(plot: Plot, names: Sequence[str]) -> str:
    """Return the plot as SVG. names: of the runs."""
    axes = Axes(plot)
    lines = [*_grid(axes), text(0, 14, plot.measure.unit)]
    middle = (LEFT + WIDTH) / 2
    lines.append(text(middle, HEIGHT - 8, "step", 'text-anchor="middle"'))
    for curve in plot.curves:
        lines += _curve(curve, axes, names)
    return drawn(HEIGHT, _in_words(plot, names), lines)


def _in_words(plot: Plot, names: Sequence[str]) -> str:
    """Return the plot's description for screen readers."""
    unit = f" ({plot.measure.unit})" if plot.measure.unit else ""
    found = []
    for curve in plot.curves:
        (_, start), (_, end) = curve.points[0], curve.points[-1]
        what = f"{names[curve.run]}, {_second_name(plot)}" if curve.second else names[curve.run]
        found.append(f"{what}: from {number(start)} to {number(end)}")
    return f"{plot.measure.title}{unit} by step. {'; '.join(found)}"


def _second_name(plot: Plot) -> str:
    return plot.measure.names[1].replace("_", " ")


def _grid(axes: Axes) -> list[str]:
    lines = []
    for value in ticks(axes.low, axes.high, 5):
        y = axes.y(value)
        lines.append(_across(y))
        lines.append(text(LEFT - 8, y + 4, number(value), _anchored("end")))
    below = HEIGHT - BOTTOM + 18
    for step in ticks(axes.first, axes.last, 8):
        if step.is_integer():
            x = axes.x(step)
            lines.append(text(x, below, f"{step:,.0f}", _anchored("middle")))
    return lines


def _across(y: float) -> str:
    place = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line class="grid" {place}/>'


def _anchored(anchor: str) -> str:
    return f'class="soft" text-anchor="{anchor}"'


def _curve(curve: Curve, axes: Axes, names: Sequence[str]) -> list[str]:
    points = thinned(curve.points, MOST_POINTS)
    name = escape(names[curve.run])
    colour = curve.run % COLOURS
    dashed = " dashed" if curve.second else ""
    places = [(axes.x(step), axes.y(value)) for step, value in points]
    lines = [_polyline(places, f"line l{colour}{dashed}", name)]
    if len(points) <= FEW:
        lines += [_point(name, colour, *each) for each in zip(points, places, strict=True)]
    return lines


def _polyline(places: Sequence[tuple[float, float]], kind: str, name: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{kind}" points="{path}"><title>{name}</title></polyline>'


def _point(name: str, colour: int, point: tuple[int, float], place: tuple[float, float]) -> str:
    """Return the circle of one step. name: escaped."""
    step, value = point
    x, y = place
    tip = f"<title>{name}, step {step:,}: {number(value)}</title>"
    return f'<circle class="p{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">{tip}</circle>'


def characters(plot: Plot, width: int = 60, height: int = 10, *, blocks: bool = True) -> list[str]:
    """Return the plot as lines of a terminal: a mark for each run. Second curves are left out.

    blocks: True if the terminal can show more than ASCII.
    """
    first, last = plot.steps
    low, high = plot.range
    side = "│" if blocks else "|"
    labels = {0: number(high), height - 1: number(low)}
    lines = []
    for row, cells in enumerate(_cells(plot, width, height, blocks=blocks)):
        label = labels.get(row, "")
        drawn = "".join(cells).rstrip()
        lines.append(f"{label:>10} {side}{drawn}")
    return [*lines, *axis(first, last, width, margin=10, blocks=blocks)]


def _cells(plot: Plot, width: int, height: int, *, blocks: bool) -> list[list[str]]:
    """Return the characters of each row; row 0 is the highest."""
    first, last = plot.steps
    low, high = plot.range
    marks = MARKS if blocks else ASCII_MARKS
    curves = [curve for curve in plot.curves if not curve.second] or list(plot.curves)
    cells = [[" "] * width for _ in range(height)]
    for curve in reversed(curves):  # the first run is drawn last, on top of the others
        mark = marks[curve.run % len(marks)]
        for step, value in thinned(curve.points, width):
            share = (step - first) / (last - first or 1)
            row = row_of(value, low, high, height)
            cells[row][round(share * (width - 1))] = mark
    return cells
