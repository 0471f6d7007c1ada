"""Drawings of a plan as SVG: stacked bars, and the schedule of a pipeline. They need no script."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from megaconv.commands.views.svg import WIDTH, drawn, text
from megaconv.planning.bubble import Timed

LABEL, ROW, BAR = 230, 26, 18
"""Width of the labels, height of a row and of its bar."""
RANK_ROW, PASS = 18, 15
"""Height of a pipeline rank's row, and of a pass in it."""
LEAST_FOR_NUMBER = 15.0
"""Width of the narrowest pass that shows its microbatch's number."""


class Bar(NamedTuple):
    """One stacked bar."""

    label: str
    parts: Mapping[str, float]
    text: str
    """The sum, as people read it."""


class Limit(NamedTuple):
    """A line across all bars."""

    value: float
    text: str


def bars(stacked: Sequence[Bar], limit: Limit | None = None) -> str:
    """Return the bars below each other, to one scale. All have the same parts in the same order."""
    totals = [sum(bar.parts.values()) for bar in stacked]
    marked = 0.0 if limit is None else limit.value
    largest = max(*totals, marked, 1e-12)
    scale = (WIDTH - LABEL - 110) / largest
    top = 18 if limit else 4
    height = top + ROW * len(stacked)
    spoken = "; ".join(f"{bar.label}: {bar.text}" for bar in stacked)
    lines = []
    for number, bar in enumerate(stacked):
        lines += _bar(bar, top + ROW * number, scale)
    if limit is not None:
        lines += _line(limit, LABEL + limit.value * scale, height)
    return drawn(height, f"stacked bars. {spoken}", lines)


def _bar(bar: Bar, y: float, scale: float) -> list[str]:
    baseline = y + 13
    lines = [text(0, baseline, bar.label)]
    x = float(LABEL)
    for number, (part, value) in enumerate(bar.parts.items()):
        width = value * scale
        tip = f"{bar.label}: {part} {value:.4g}"
        if width > 0:
            lines.append(_box(x, y, width, BAR, f"p{number}", tip))
        x += width
    lines.append(text(x + 6, baseline, bar.text))
    return lines


def _line(limit: Limit, x: float, height: float) -> list[str]:
    return [
        f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}"/>',
        text(x, 11, limit.text, 'text-anchor="middle"'),
    ]


def schedule(passes: Sequence[Timed], ranks: int, kind: str) -> str:
    """Return the passes of each pipeline rank along the time. Times are in seconds. kind: of the schedule."""
    end = max(each.end for each in passes)
    scale = (WIDTH - 60) / end
    bottom = RANK_ROW * ranks
    idle = _idle(passes, ranks, end)
    lines = [text(0, RANK_ROW * rank + 13, f"pp {rank}") for rank in range(ranks)]
    for each in passes:
        lines += _pass(each, scale)
    lines += _time_axis(bottom, end)
    spoken = f"{kind} schedule of {_seconds(end)}. Idle time: {idle}"
    return drawn(bottom + 34, spoken, lines)


def _idle(passes: Sequence[Timed], ranks: int, end: float) -> str:
    """Return the share of the time in which each rank waits."""
    busy = [0.0] * ranks
    for each in passes:
        busy[each.rank] += each.end - each.start
    return ", ".join(f"pp {rank} {1 - time / end:.0%}" for rank, time in enumerate(busy))


def _time_axis(y: float, end: float) -> list[str]:
    """Return marks at quarters of the time, with their seconds."""
    lines = [text(0, y + 18, "time", 'class="soft"')]
    anchors = ("start", "middle", "middle", "middle", "end")
    for quarter, anchor in enumerate(anchors):
        x = 60 + (WIDTH - 60) * quarter / 4
        lines.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>')
        place = f'class="soft" text-anchor="{anchor}"'
        lines.append(text(x, y + 18, _seconds(end * quarter / 4), place))
    return lines


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1000:.3g} ms"


def _pass(each: Timed, scale: float) -> list[str]:
    action = each.action
    y = RANK_ROW * each.rank
    x = 60 + each.start * scale
    width = (each.end - each.start) * scale
    word = "backward" if action.backward else "forward"
    kind = f"{word} c{action.chunk % 2}"
    when = f"{each.start:.4g} to {each.end:.4g} s"
    pass_name = f"{word} pass of microbatch {action.microbatch}"
    tip = f"pp {each.rank}, chunk {action.chunk}: {pass_name}, {when}"
    lines = [_box(x, y, max(width - 0.5, 0.2), PASS, kind, tip)]
    if width >= LEAST_FOR_NUMBER:
        style = 'class="on small" text-anchor="middle"'
        lines.append(text(x + width / 2, y + 11, str(action.microbatch), style))
    return lines


def _box(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.2f}" height="{height}"'
    return f'<rect class="{kind}" {place}><title>{escape(tip)}</title></rect>'
