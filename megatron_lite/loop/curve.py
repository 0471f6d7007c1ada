"""A curve of numbers in characters, for a terminal."""

from collections.abc import Sequence
from statistics import fmean

BLANK, POINT = " ", "•"


def draw(points: Sequence[tuple[int, float]], width: int = 60, height: int = 8) -> list[str]:
    """Return the lines of a plot of (step, value). Each column shows the mean of its steps. At least one point is needed."""
    columns = _columns([value for _, value in points], width)
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


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each of at most `width` equal parts."""
    count = min(width, len(values))
    found = []
    for column in range(count):
        first = column * len(values) // count
        last = (column + 1) * len(values) // count
        found.append(fmean(values[first:last]))
    return found


def row_of(value: float, low: float, high: float, height: int) -> int:
    """Return the row of a value; row 0 is the highest."""
    if high == low:
        return height // 2
    return round((high - value) / (high - low) * (height - 1))
