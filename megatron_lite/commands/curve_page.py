"""`plot --html`: the curves of several runs as one page, without scripts and requests."""

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite
from statistics import median

from megaconv.commands.views.look import still_page
from megaconv.commands.views.svg import key, legend
from megatron_lite.commands.curve_drawing import COLOURS, drawing, number
from megatron_lite.commands.curves import MOST_POINTS, Plot
from megatron_lite.commands.run_logs import RunLog

COLUMNS = (
    "run",
    "last step",
    "last loss",
    "lowest loss",
    "validation loss",
    "tokens/s of a device, median",
)


def curve_page(runs: Sequence[RunLog], found: Sequence[Plot]) -> str:
    """Return the page."""
    return still_page("Training curves", "\n".join(_body(runs, found)))


def _body(runs: Sequence[RunLog], found: Sequence[Plot]) -> Iterator[str]:
    yield _table(runs)
    names = [run.name for run in runs]
    if any(curve.second for plot in found for curve in plot.curves):
        yield '<p class="soft">Dashed: the validation loss.</p>'
    longest = max(len(curve.points) for plot in found for curve in plot.curves)
    if longest > MOST_POINTS:
        yield f'<p class="soft">Each point of a long curve is the mean of some steps: {MOST_POINTS} points at most.</p>'
    for plot in found:
        yield f"<h2>{escape(plot.measure.title.capitalize())}</h2>"
        yield f'<figure class="drawing" tabindex="0">{drawing(plot, names)}</figure>'
        if len(runs) > 1:
            shown = sorted({curve.run for curve in plot.curves})
            yield legend((run % COLOURS, names[run]) for run in shown)


def _table(runs: Sequence[RunLog]) -> str:
    """Return a row for each run."""
    head = "".join(f'<th scope="col"{_right(name != "run")}>{name}</th>' for name in COLUMNS)
    rows = []
    for index, run in enumerate(runs):
        cells = "".join(f"<td{_right(True)}>{each}</td>" for each in _numbers(run))
        rows.append(
            f'<tr><th scope="row">{key(index % COLOURS)}{escape(run.name)}</th>{cells}</tr>'
        )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _right(right: bool) -> str:
    return ' class="n"' if right else ""


def _numbers(run: RunLog) -> Iterator[str]:
    losses, checked, speeds = (
        [value for _, value in run.values.get(name, ()) if isfinite(value)]
        for name in ("loss", "validation_loss", "tokens_per_second")
    )
    yield f"{run.last_step:,}"
    yield number(losses[-1]) if losses else "–"
    yield number(min(losses)) if losses else "–"
    yield number(checked[-1]) if checked else "–"
    yield number(median(speeds)) if speeds else "–"
