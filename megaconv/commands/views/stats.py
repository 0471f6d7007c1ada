"""`inspect --stats`: statistics of the values of every tensor. Reads everything."""

from collections.abc import Iterator, Mapping
from typing import Any

from megaconv.engine.statistics import Statistics

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS = " .:-=+*#@"
_SHOWN_BINS = 16
_HEADING = f"{'mean':>10} {'std':>10} {'min':>10} {'max':>10} {'zeros':>7}  histogram"


def lines(
    found: Mapping[str, Statistics], *, blocks: bool = True, columns: int | None = None
) -> Iterator[str]:
    """Lines for people: one per tensor. If that exceeds `columns`, one line for its name and one for its values."""
    width = max(map(len, found), default=0)
    longest_values = len(_HEADING) - len("histogram") + _SHOWN_BINS
    longest_line = width + 2 + longest_values
    if columns is not None and longest_line > columns:
        yield _HEADING
        for name, stats in found.items():
            yield name
            yield _values(stats, blocks)
        return
    yield f"{'':<{width}}  {_HEADING}"
    for name, stats in found.items():
        yield f"{name:<{width}}  {_values(stats, blocks)}"


def _values(stats: Statistics, blocks: bool) -> str:
    numbers = " ".join(
        f"{value:>10.3g}" for value in (stats.mean, stats.std, stats.minimum, stats.maximum)
    )
    zeros = f"{100 * stats.zeros / stats.elements:.1f}%" if stats.elements else "-"
    return f"{numbers} {zeros:>7}  {_bars(stats, blocks)}{_not_numbers(stats)}"


def _not_numbers(stats: Statistics) -> str:
    counts = {"NaN": stats.nan, "infinite": stats.infinite}
    return "".join(f"  {count:,} {what}" for what, count in counts.items() if count)


def _bars(stats: Statistics, blocks: bool) -> str:
    glyphs = _BARS if blocks else _PLAIN_BARS
    step = max(1, len(stats.histogram) // _SHOWN_BINS)
    counts = [
        sum(stats.histogram[start : start + step]) for start in range(0, len(stats.histogram), step)
    ]
    most = max(counts, default=0) or 1
    return "".join(glyphs[-(-count * (len(glyphs) - 1) // most)] for count in counts)


def to_json(found: Mapping[str, Statistics]) -> dict[str, Any]:
    return {name: stats.to_json() for name, stats in found.items()}
