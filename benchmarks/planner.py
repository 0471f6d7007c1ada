"""Compares the planner with published runs, measures its speed, and fits its constants. It needs no GPU.

python -m benchmarks.planner errors    the error of every published run, as the table of docs/planning.md
python -m benchmarks.planner ranks     the rank of published layouts among all layouts
python -m benchmarks.planner speed     candidates per second
python -m benchmarks.planner fit       constants that fit half of the published runs best
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from math import sqrt

from benchmarks.published_runs import RUNS, UNKNOWN, Published
from megaconv.model.layout import Layout
from megaconv.planning import layer_costs
from megaconv.planning.estimate import Estimate, Estimator
from megaconv.planning.gpus import GPUS
from megaconv.planning.layer_costs import Machine
from megaconv.planning.recomputation import Recompute
from megaconv.planning.run import Run
from megaconv.planning.search import (
    MICRO_BATCHES,
    VIRTUAL,
    Wanted,
    best_of_each,
    search,
)
from megaconv.planning.splits import even_stages, head_layers

SET_UPS = {
    "GPT-3 175B in FP8, 512 GPUs": 512,
    "Llama-3 405B": 8192,
    "Nemotron-4 340B": 1536,
    "Mixtral 8x7B": 64,
    "DeepSeek-V3": 2048,
}
"""Name -> GPUs of the runs whose layouts the search has to find."""


def runs_of(published: Published) -> Iterator[Run]:
    """Yield the run, with every value of the sizes that the publication leaves out."""
    virtual = VIRTUAL if published.vpp is None else (published.vpp,)
    batches = MICRO_BATCHES if published.micro_batch is None else (published.micro_batch,)
    dp = published.gpus // (published.tp * published.pp * published.cp)
    again = (None, "selective", "full")
    recompute = again if published.recompute == UNKNOWN else (published.recompute,)
    for vpp, micro_batch, granularity in product(virtual, batches, recompute):
        microbatches, rest = divmod(published.global_batch, micro_batch * dp)
        stages = published.pp * vpp
        if rest or not microbatches or stages > published.config.layer_count + 2:
            continue
        if vpp > 1 and (published.pp == 1 or microbatches % published.pp):
            continue
        split = even_stages(published.config.layer_count, stages, head_layers(published.config))
        yield Run(
            config=published.config,
            layout=Layout(published.tp, published.pp, vpp, published.ep, 1, stage_layers=split),
            dp=dp,
            cp=published.cp,
            seq=published.seq,
            micro_batch=micro_batch,
            global_batch=published.global_batch,
            sequence_parallel=published.tp > 1,
            recompute=Recompute(granularity),
            sharding=published.sharding,
            dispatcher=published.dispatcher,
            overlaps_experts=published.overlaps_experts,
        )


def machine_of(published: Published) -> Machine:
    """Return the GPU of a run."""
    return Machine(GPUS[published.gpu], fp8=published.fp8)


def estimate_of(published: Published) -> Estimate:
    """Return the estimate of a published run; of several possible ones that with the shortest step that fits."""
    estimator = Estimator(published.config, machine_of(published))
    found = [estimator.estimate(run) for run in runs_of(published)]
    memory = GPUS[published.gpu].memory
    fitting = [one for one in found if one.memory.total <= memory]
    return min(fitting or found, key=lambda one: one.time.total)


def error_of(published: Published) -> float:
    """Return the relative error of the estimated time."""
    return estimate_of(published).time.total / published.seconds - 1


def table() -> Iterator[str]:
    """Yield the lines of the table of errors."""
    yield "| run | GPUs | layout | published | estimated | error | fitted | source |"
    yield "|---|---|---|---|---|---|---|---|"
    for published in RUNS:
        estimate = estimate_of(published)
        run = estimate.run
        layout = f"TP {run.layout.tp}, PP {run.layout.pp}, VPP {run.layout.vpp}"
        more = {"EP": run.layout.ep, "CP": run.cp}
        layout += "".join(f", {name} {size}" for name, size in more.items() if size > 1)
        if run.recompute.granularity:
            layout += f", {run.recompute.granularity} recomputation"
        error = estimate.time.total / published.seconds - 1
        yield (
            f"| {published.name} | {published.gpus:,} {published.gpu} | {layout} | {published.seconds:.2f} s | "
            f"{estimate.time.total:.2f} s | {error:+.0%} | {'yes' if published.fitted else ''} | {published.source} |"
        )


def wanted_of(published: Published) -> Wanted:
    """Return the search in which a published layout competes."""
    return Wanted(
        gpus=published.gpus,
        seq=published.seq,
        global_batch=published.global_batch,
        memory=GPUS[published.gpu].memory,
        dispatcher=published.dispatcher,
        overlaps_experts=published.overlaps_experts,
    )


def set_ups() -> Iterator[Published]:
    """Yield the published runs of SET_UPS."""
    for published in RUNS:
        if SET_UPS.get(published.name) == published.gpus:
            yield published


def ranks() -> Iterator[str]:
    """Yield the lines of the table of ranks."""
    yield "| run | GPUs | layout | memory | step | rank | of | first |"
    yield "|---|---|---|---|---|---|---|---|"
    for published in set_ups():
        found, _ = search(published.config, wanted_of(published), machine_of(published))
        layouts = best_of_each(found)
        theirs, first = estimate_of(published), layouts[0]
        rank = bisect_left([one.time.total for one in layouts], theirs.time.total) + 1
        yield (
            f"| {published.name} | {published.gpus:,} {published.gpu} | {_shown(theirs.run)} | "
            f"{theirs.memory.total / 2**30:.0f} GiB | {theirs.time.total:.2f} s | {rank} | {len(layouts):,} | "
            f"{first.time.total:.2f} s: {_shown(first.run)} |"
        )


def _shown(run: Run) -> str:
    layout = run.layout
    more = {"EP": layout.ep, "CP": run.cp}
    return f"TP {layout.tp}, PP {layout.pp}, VPP {layout.vpp}" + "".join(
        f", {name} {size}" for name, size in more.items() if size > 1
    )


def speed() -> Iterator[str]:
    """Yield the candidates per second of processor time, for each set-up."""
    for published in set_ups():
        started = time.process_time()
        _, tried = search(published.config, wanted_of(published), machine_of(published))
        seconds = time.process_time() - started
        yield f"{published.name}: {tried:,} candidates in {seconds:.1f} s, {tried / seconds:,.0f} a second"


def fit() -> Iterator[str]:
    """Yield the constants with the smallest mean square of errors: first those of bf16, then that of FP8."""
    in_bf16 = [run for run in RUNS if run.fitted and not run.fp8]
    grid = product((0.62, 0.64, 0.66, 0.68, 0.7, 0.72), (0.5, 0.75, 1.0), (3.0, 3.5, 4.0, 4.5, 5.0))
    errors = []
    for values in grid:
        layer_costs.PRODUCTS, layer_costs.TENSOR_EXPOSED, layer_costs.ELEMENTWISE = values
        errors.append((_spread(in_bf16), values))
    error, best = min(errors)
    yield f"PRODUCTS, TENSOR_EXPOSED, ELEMENTWISE = {best}: {error:.1%}"
    layer_costs.PRODUCTS, layer_costs.TENSOR_EXPOSED, layer_costs.ELEMENTWISE = best
    in_fp8 = [run for run in RUNS if run.fitted and run.fp8]
    errors_of_fp8 = []
    for value in (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8):
        layer_costs.PRODUCTS_FP8 = value
        errors_of_fp8.append((_spread(in_fp8), value))
    error, share = min(errors_of_fp8)
    yield f"PRODUCTS_FP8 = {share}: {error:.1%}"


def _spread(runs: list[Published]) -> float:
    """Return the root of the mean square of errors."""
    return sqrt(sum(error_of(run) ** 2 for run in runs) / len(runs))


COMMANDS = {"errors": table, "ranks": ranks, "speed": speed, "fit": fit}


def main() -> None:
    """Print the lines of a command."""
    for line in COMMANDS[sys.argv[1]]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
