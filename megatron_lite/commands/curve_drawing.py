"""A plot of several curves: as SVG for a page, and in characters for a terminal."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from megatron_lite.commands.curves import Curve, Plot, thinned
from megatron_lite.loop.curve import axis, row_of

WIDTH, HEIGHT = 1000, 300
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
    unit = f" ({plot.measure.unit})" if plot.measure.unit else ""
    spoken = escape(f"{plot.measure.title}{unit} by step. {_in_words(plot, names)}")
    lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{spoken}">']
    lines += _grid(axes)
    lines.append(_text(0, 14, plot.measure.unit))
    lines.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, "step", 'text-anchor="middle"'))
    for curve in plot.curves:
        lines += _curve(curve, axes, names)
    return "\n".join([*lines, "</svg>"])


def _in_words(plot: Plot, names: Sequence[str]) -> str:
    found = []
    for curve in plot.curves:
        (_, start), (_, end) = curve.points[0], curve.points[-1]
        what = f"{names[curve.run]}, {_second_name(plot)}" if curve.second else names[curve.run]
        found.append(f"{what}: from {number(start)} to {number(end)}")
    return "; ".join(found)


def _second_name(plot: Plot) -> str:
    return plot.measure.names[1].replace("_", " ")


def _grid(axes: Axes) -> list[str]:
    lines = []
    for value in ticks(axes.low, axes.high, 5):
        y = f"{axes.y(value):.1f}"
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        place = 'class="soft" text-anchor="end"'
        lines.append(_text(LEFT - 8, axes.y(value) + 4, number(value), place))
    for step in ticks(axes.first, axes.last, 8):
        if step == int(step):
            place = 'class="soft" text-anchor="middle"'
            lines.append(_text(axes.x(step), HEIGHT - BOTTOM + 18, f"{int(step):,}", place))
    return lines


def _curve(curve: Curve, axes: Axes, names: Sequence[str]) -> list[str]:
    points = thinned(curve.points)
    colour = curve.run % COLOURS
    dashed = " dashed" if curve.second else ""
    places = [(axes.x(step), axes.y(value)) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = escape(names[curve.run])
    lines = [f'<polyline class="line l{colour}{dashed}" points="{path}"><title>{name}</title></polyline>']  # fmt: skip
    if len(points) <= FEW:
        for (x, y), (step, value) in zip(places, points, strict=True):
            tip = f"<title>{name}, step {step:,}: {number(value)}</title>"
            lines.append(
                f'<circle class="p{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">{tip}</circle>'
            )
    return lines


def _text(x: float, y: float, words: str, place: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {place}>{escape(words)}</text>'


def characters(plot: Plot, width: int = 60, height: int = 10, *, blocks: bool = True) -> list[str]:
    """Return the plot as lines of a terminal: a mark for each run. Second curves are left out.

    blocks: True if the terminal can show more than ASCII.
    """
    first, last = plot.steps
    curves = [curve for curve in plot.curves if not curve.second] or list(plot.curves)
    low, high = plot.range
    cells = [[" "] * width for _ in range(height)]
    for curve in reversed(curves):  # the first run is drawn last, on top of the others
        mark = (MARKS if blocks else ASCII_MARKS)[curve.run % len(MARKS)]
        for step, value in thinned(curve.points, width):
            column = round((step - first) / (last - first or 1) * (width - 1))
            cells[row_of(value, low, high, height)][column] = mark
    side = "│" if blocks else "|"
    labels = {0: number(high), height - 1: number(low)}
    lines = [
        f"{labels.get(row, ''):>10} {side}{''.join(line)}".rstrip()
        for row, line in enumerate(cells)
    ]
    return [*lines, *axis(first, last, width, margin=10, blocks=blocks)]
