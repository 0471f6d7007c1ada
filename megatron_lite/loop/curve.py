"""A curve of numbers in characters, for a terminal."""

from collections.abc import Sequence
from statistics import fmean

BLANK, POINT = " ", "•"


def draw(points: Sequence[tuple[int, float]], width: int = 60, height: int = 8) -> list[str]:
    """Return the lines of a plot of (step, value). Each column shows the mean of its steps. At least one point is needed."""
    columns = _columns([value for _, value in points], width)
    low, high = min(columns), max(columns)
    rows = [_row(value, low, high, height) for value in columns]
    lines = []
    for row in range(height):
        label = high if row == 0 else low if row == height - 1 else None
        shown = f"{label:9.4f}" if label is not None else " " * 9
        dots = "".join(POINT if each == row else BLANK for each in rows)
        lines.append(f"{shown} │{dots.rstrip()}")
    first, last = points[0][0], points[-1][0]
    gap = max(1, len(columns) - len(f"{first}{last}"))
    lines.append(" " * 10 + "└" + "─" * len(columns))
    lines.append(" " * 11 + f"{first}{' ' * gap}{last}  step")
    return lines


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each of at most `width` equal parts."""
    count = min(width, len(values))
    found = []
    for column in range(count):
        first = column * len(values) // count
        last = (column + 1) * len(values) // count
        found.append(fmean(values[first:last]))
    return found


def _row(value: float, low: float, high: float, height: int) -> int:
    """Return the row of a value; row 0 is the highest."""
    if high == low:
        return height // 2
    return round((high - value) / (high - low) * (height - 1))
