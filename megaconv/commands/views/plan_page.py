"""`plan --html`: the layouts of a plan as one page, with bars of memory and time and the schedule of the pipeline.

The page holds everything that it shows. It has no script and sends no request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from shlex import join

from formats.wording import counted
from megaconv.commands.best_layouts import BestLayouts, Placed
from megaconv.commands.layouts import Layouts, Possible
from megaconv.commands.served_layouts import PlacedServer, ServedLayouts
from megaconv.commands.units import readable, readable_time
from megaconv.commands.views.bars import Bar, Limit, bars, schedule
from megaconv.commands.views.look import still_page
from megaconv.commands.views.svg import legend
from megaconv.planning.bubble import timeline
from megaconv.planning.estimate import Estimator
from megaconv.planning.run import Run

PROGRAMS = {"megatron_lm": "Megatron-LM", "megatron_lite": "megatron-lite", "vllm": "vLLM"}
MOST_PASSES = 6000
"""Passes that a page draws at most."""


@dataclass(frozen=True)
class Row:
    """A layout on the page."""

    label: str
    cells: Mapping[str, str]
    """Column -> text."""
    memory: Mapping[str, float]
    """Bytes by purpose."""
    seconds: Mapping[str, float]
    """Seconds by term; empty if the plan has no times."""


def plan_page(name: str, found: "BestLayouts | ServedLayouts | Layouts") -> str:
    """Return the page. name: of the model, as the user gave it."""
    return still_page(f"Plan of {name}", "\n".join(_body(found)))


def _body(found: "BestLayouts | ServedLayouts | Layouts") -> Iterator[str]:
    if isinstance(found, BestLayouts):
        yield from _facts(found.description())
        rows = [_of_run(one) for one in found.placed]
        yield from _table_and_bars(rows, found.wanted.memory, "a step")
        yield from _pipeline(found)
        yield from _flags(found.flags())
    elif isinstance(found, ServedLayouts):
        yield from _facts(found.description())
        servers = [_of_server(one) for one in found.placed]
        yield from _table_and_bars(servers, found.wanted.memory, "a token")
        yield from _flags(found.flags())
    else:
        yield from _facts(found.notes())
        possible = [_of_possible(one) for one in found.possible]
        yield from _table_and_bars(possible, found.memory, "")


def _facts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"<p>{escape(line)}</p>"


def _table_and_bars(rows: Sequence[Row], memory: int | None, what: str) -> Iterator[str]:
    """Yield the table, the bars of memory and, if there are times, those of the time of `what`."""
    yield "<h2>Layouts</h2>"
    yield _table(rows)
    yield "<h2>Memory of the fullest rank</h2>"
    stacked = [Bar(row.label, row.memory, readable(sum(row.memory.values()))) for row in rows]
    limit = None if memory is None else Limit(memory, f"{readable(memory)} of a GPU")
    yield _drawn(stacked, limit)
    if rows[0].seconds:
        yield f"<h2>Time of {what}</h2>"
        times = [
            Bar(row.label, row.seconds, readable_time(sum(row.seconds.values()))) for row in rows
        ]
        yield _drawn(times, None)


def _drawn(stacked: Sequence[Bar], limit: Limit | None) -> str:
    names = legend(enumerate(stacked[0].parts))
    return f'{names}<figure class="drawing" tabindex="0">{bars(stacked, limit)}</figure>'


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0].cells)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in row.cells.values())
        lines.append(f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _of_run(one: Placed) -> Row:
    run, estimate = one.estimate.run, one.estimate
    layout = run.layout
    sizes = {
        "#": one.rank, "TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "EP": layout.ep, "ETP": layout.etp, "CP": run.cp,
        "DP": run.dp, "microbatch": run.micro_batch,
    }  # fmt: skip
    cells = {name: f"{size:,}" for name, size in sizes.items()} | {
        "recompute": run.recompute.granularity or "-",
        "sharding": run.sharding,
        "step": readable_time(estimate.time.total),
        "tokens/s a GPU": f"{estimate.tokens_per_second:,.0f}",
        "memory": readable(estimate.memory.total),
        "loses by": one.limit,
    }
    named = ("TP", "PP", "VPP", "EP", "CP")
    return Row(_label(sizes, named), cells, estimate.memory.parts(), estimate.time.terms())


def _of_server(one: PlacedServer) -> Row:
    served, serving = one.served, one.served.serving
    layout = serving.layout
    sizes = {
        "#": one.rank, "TP": layout.tp, "PP": layout.pp, "EP": layout.ep, "ETP": layout.etp, "DP": serving.dp,
        "sequences": serving.batch * serving.dp,
    }  # fmt: skip
    cells = {name: f"{size:,}" for name, size in sizes.items()} | {
        "first token": readable_time(served.first_token),
        "each token": readable_time(served.time.total),
        "tokens/s": f"{served.tokens_per_second:,.0f}",
        "memory": readable(served.memory.total),
        "dominated by": one.limit,
    }
    named = ("TP", "PP", "EP", "DP")
    return Row(_label(sizes, named), cells, served.memory.parts(), served.time.terms())


def _of_possible(one: Possible) -> Row:
    sizes = {**{name.upper(): size for name, size in one.layout.sizes().items()}, "GPUs": one.world}
    cells = {name: f"{size:,}" for name, size in sizes.items()} | {
        "parameters a rank": f"{one.share.parameters:,}",
        "weights": readable(one.weight_bytes),
        "to train": readable(one.training_bytes),
    }
    memory = {
        "weights": float(one.weight_bytes),
        "gradients and optimizer state": float(one.training_bytes - one.weight_bytes),
    }
    return Row(_label(sizes, ("TP", "PP", "EP")), cells, memory, {})


def _label(sizes: Mapping[str, int], named: Sequence[str]) -> str:
    """Return the sizes above 1, behind the number of the layout if it has one."""
    number = f"{sizes['#']}: " if "#" in sizes else ""
    parts = [f"{name} {sizes[name]}" for name in named if sizes[name] > 1]
    return number + (", ".join(parts) or "no model parallelism")


def _pipeline(found: BestLayouts) -> Iterator[str]:
    """Yield the schedule of the first layout."""
    run = found.placed[0].estimate.run
    yield "<h2>Schedule of the pipeline</h2>"
    if run.layout.pp == 1:
        yield "<p>The first layout has one pipeline stage, so no rank waits for another one.</p>"
        return
    seconds = Estimator(run.config, found.machine).chunk_seconds(run)
    drawn = _drawn_microbatches(run)
    passes = timeline(run.layout.pp, run.layout.vpp, drawn, lambda stage: seconds[stage] / 3)
    which = f"all {drawn:,} microbatches"
    if drawn < run.microbatches:
        which = f"the first {drawn:,} of {run.microbatches:,} microbatches, as if they were the whole step"
    kind, virtual = "1F1B", ""
    if run.layout.vpp > 1:
        kind, virtual = "interleaved 1F1B", f" with {run.layout.vpp} virtual stages"
    yield (
        f'<p class="soft">The first layout with {which}. The order of passes is {kind}{virtual}. '
        "A backward pass takes twice the time of a forward pass. Numbers are those of microbatches. "
        "Paler passes belong to every second virtual stage.</p>"
    )
    yield legend(enumerate(["forward pass", "backward pass"]))
    drawing = schedule(passes, run.layout.pp, kind)
    yield f'<figure class="drawing" tabindex="0">{drawing}</figure>'
    yield f'<p class="soft">{escape(_stages_in_words(run))}</p>'


def _stages_in_words(run: Run) -> str:
    """Return the layers of each stage, in the order of the model."""
    layers = [str(chunk.layers) for chunk in run.layout.chunks()]
    if len(set(layers)) == 1:
        return f"Each of {len(layers)} stages has {counted(int(layers[0]), 'layer')}."
    return f"Layers of the stages, in the order of the model: {', '.join(layers)}."


def _drawn_microbatches(run: Run) -> int:
    """Return a number of microbatches that a page can show: a multiple of PP, since virtual stages require it."""
    pp, vpp = run.layout.pp, run.layout.vpp
    rounds = max(1, min(3, MOST_PASSES // (2 * pp * vpp * pp)))
    return min(run.microbatches, rounds * pp)


def _flags(flags: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield "<h2>Flags of the first layout</h2>"
    for program, words in flags.items():
        if words:
            yield f"<p>{PROGRAMS[program]}</p><pre>{escape(join(words))}</pre>"
