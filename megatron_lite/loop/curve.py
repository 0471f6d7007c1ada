"""A curve of numbers in characters, for a terminal."""

from collections.abc import Sequence
from statistics import fmean

BLANK, POINT = " ", "•"


Points = Sequence[tuple[int, float]]
"""(step, value) in the order of steps."""


def draw(points: Points, width: int = 60, height: int = 8) -> list[str]:
    """Return the lines of a plot. Each column shows the mean of its steps. At least one point is needed."""
    columns = [value for _, value in thinned(points, width)]
    low, high = min(columns), max(columns)
    rows = [row_of(value, low, high, height) for value in columns]
    labels = {0: f"{high:9.4f}", height - 1: f"{low:9.4f}"}
    lines = []
    for row in range(height):
        label = labels.get(row, "")
        lines.append(f"{label:>9} │{_dots(rows, row)}")
    return [*lines, *axis(points[0][0], points[-1][0], len(columns))]


def _dots(rows: Sequence[int], row: int) -> str:
    """Return the points of one row. rows: the row of each column's point."""
    dots = [POINT if each == row else BLANK for each in rows]
    return "".join(dots).rstrip()


def axis(first: int, last: int, width: int, *, margin: int = 9, blocks: bool = True) -> list[str]:
    """Return the lines below the plot, with the first and the last step. margin: width of the labels at its side."""
    corner, dash = ("└", "─") if blocks else ("+", "-")
    gap = " " * max(1, width - len(f"{first}{last}"))
    return [f"{'':{margin}} {corner}{dash * width}", f"{'':{margin}}  {first}{gap}{last}  step"]


def thinned(points: Points, most: int) -> Points:
    """Return at most so many points. Each of them is the mean of some steps, and stands at the last of them."""
    if len(points) <= most:
        return points
    found = []
    for number in range(most):
        part = points[number * len(points) // most : (number + 1) * len(points) // most]
        found.append((part[-1][0], fmean(value for _, value in part)))
    return found


def row_of(value: float, low: float, high: float, height: int) -> int:
    """Return the row of a value; row 0 is the highest."""
    if high == low:
        return height // 2
    return round((high - value) / (high - low) * (height - 1))
