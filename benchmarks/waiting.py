"""The share of a step that two ranks on gloo spend on each other: in collectives and messages, sending, summing and
waiting alike.

    python benchmarks/waiting.py [--sequence 512] [--steps 5] [--json]

One thread a rank. share: of the step's time, of the rank that has more of it; medians over the steps. What is started and waited for later
counts with what it takes to start and to wait, so that what overlaps with computing doesn't count. On a machine that has other things
to do, or fewer than two free cores, a rank also waits for one that isn't running.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaconv.model.fields import from_fields
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

ROOT = Path(__file__).parents[1]
SIZES: dict[str, Any] = {
    "layers.count": 8, "hidden": 384, "attention.heads": 8, "attention.kv_heads": 4, "attention.head_dim": 48, "mlp.ffn": 1024,
    "vocab": 4096, "norm.epsilon": 1e-5, "positions.theta": 1e4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "layers.mlp": "experts",
    "experts.count": 8,
    "experts.per_token": 2,
    "experts.ffn": 512,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tp": 2}, "PP2": {"pp": 2}, "DP2": {"dp": 2}, "EP2": {"dp": 2, "ep": 2}, "CP2": {"cp": 2},
}  # fmt: skip
"""TP with sequence parallelism, DP and EP with the distributed optimizer."""
MICROBATCHES = 4


class Clock:
    """Sums up what functions of torch.distributed take, and the waits for what they start."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            found = function(*arguments, **named)
            self.seconds += time.perf_counter() - begun
            return (
                [Waiting(work, self) for work in found]
                if isinstance(found, list)
                else found and Waiting(found, self)
            )

        return call

    def listen(self) -> None:
        for name in ("all_reduce", "broadcast", "all_to_all_single", "batch_isend_irecv"):
            setattr(dist, name, self.timed(getattr(dist, name)))
        for name in ("_reduce_scatter", "_all_gather", "send", "receive"):
            setattr(comm, name, self.timed(getattr(comm, name)))


class Waiting:
    """A collective that is under way."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work, self._clock = work, clock
        self.wait = clock.timed(lambda: work.wait() and None)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def rank(name: str, sequence: int, steps: int) -> dict[str, float]:
    """The figures of the rank that has more of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1} | LAYOUTS[name]
    fields = {**SIZES, "max_positions": sequence, **(EXPERTS if name == "EP2" else {})}
    config = from_fields("mixtral" if name == "EP2" else "llama", fields)
    stages = split_layers(config.layer_count, sizes["pp"], 1, LayerSplit())
    layout = Layout(sizes["tp"], sizes["pp"], 1, sizes["ep"], stage_layers=stages)
    grid = make_grid(
        layout, sizes["dp"], torch.device("cpu"), cp=sizes["cp"], experts=name == "EP2"
    )
    options = ModelOptions(dtype="float32", sequence_parallel=name == "TP2")
    engine = Engine(config, grid, options, OptimizerOptions(distributed=sizes["dp"] > 1))
    init_weights(engine, 0.02, 0)
    tokens = torch.randint(
        0, config.vocab, (MICROBATCHES, sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    batches = [
        Microbatch(row[None, :-1], row[None, 1:], index=index) for index, row in enumerate(tokens)
    ]
    clock = Clock()
    clock.listen()
    times, shares = [], []
    for _ in range(steps + 1):
        dist.barrier()
        clock.seconds, begun = 0.0, time.perf_counter()
        engine.train_step(batches[grid.dp_rank :: grid.dp], 1e-4)
        engine.finish()
        times.append(time.perf_counter() - begun)
        shares.append(clock.seconds / times[-1])
    figures = torch.tensor(
        [statistics.median(times[1:]), statistics.median(shares[1:])], dtype=torch.float64
    )
    both = [torch.empty_like(figures) for _ in range(2)]
    dist.all_gather(both, figures)
    dist.destroy_process_group()
    most = max(both, key=lambda found: float(found[1]))
    return {"step_ms": round(float(most[0]) * 1e3), "share": round(float(most[1]), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.layout:
        found = rank(given.layout, given.sequence, given.steps)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    figures = {}
    for name in LAYOUTS:
        figures[name] = measure(name, given.sequence, given.steps)
        if not given.json:
            print(
                f"{name}  step {figures[name]['step_ms']:>6.0f} ms, of which {figures[name]['share']:.0%} on the other rank",
                flush=True,
            )
    if given.json:
        print(json.dumps(figures))


def measure(name: str, sequence: int, steps: int) -> dict[str, float]:
    words = ["--layout", name, "--sequence", str(sequence), "--steps", str(steps)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        *words,
    ]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
