"""The savings of context parallelism: activations of one sequence whose tokens 1, 2 or 4 ranks share, on the CPU and
gloo.

    python benchmarks/context.py [--sequence 2048] [--steps 3] [--json]

kept: bytes that autograd holds after one forward pass, parameters apart, on the rank that holds most. peak: what a step adds to a
process's memory at most, above the model and its optimizer. step: median time, one thread a rank; on a machine with fewer cores than ranks
it says nothing about speed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import CONTEXT, ModelOptions, OptimizerOptions

ROOT = Path(__file__).parents[1]
MODEL: dict[str, Any] = {
    "layers.count": 8,
    "hidden": 384,
    "attention.heads": 8,
    "attention.kv_heads": 4,
    "attention.head_dim": 48,
    "mlp.ffn": 1024,
    "vocab": 4096,
    "norm.epsilon": 1e-5,
    "positions.theta": 1e4,
}


def rank(cp: int, how: str, sequence: int, steps: int) -> dict[str, float]:
    """One process's figures; of several the largest."""
    torch.set_num_threads(1)
    if cp > 1:
        dist.init_process_group("gloo")
    config = from_fields("llama", {**MODEL, "max_positions": sequence})
    grid = make_grid(Layout(stage_layers=(config.layer_count,)), 1, torch.device("cpu"), cp=cp)
    engine = Engine(
        config,
        grid,
        ModelOptions(dtype="float32", context=how),
        OptimizerOptions(distributed=cp > 1),
    )
    init_weights(engine, 0.02, 0)
    tokens = torch.randint(
        0, config.vocab, (1, sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
    kept = kept_bytes(engine, batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        engine.train_step([batch], 1e-4)
        engine.finish()
        times.append(time.perf_counter() - begun)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    figures = torch.tensor([kept, peak, statistics.median(times)], dtype=torch.float64)
    if cp > 1:
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        dist.destroy_process_group()
    kept, peak, seconds = figures.tolist()
    return {
        "kept_MB": round(kept / 1e6, 1),
        "peak_MB": round(peak / 1e6, 1),
        "step_ms": round(seconds * 1e3),
    }


def kept_bytes(engine: Engine, batch: Microbatch) -> int:
    """The bytes kept of one forward pass, each storage once."""
    parameters = {tensor.untyped_storage().data_ptr() for _, _, tensor in engine.parameters()}
    storages: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    (chunk,) = engine.chunks
    run = engine.make_pass(batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk.loss(chunk((), run), run)
    return sum(storages.values())


def measure(sequence: int, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    runs = [(1, CONTEXT[0]), *((cp, how) for how in CONTEXT for cp in (2, 4))]
    whole = 0.0
    for cp, how in runs:
        launch = (
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp)]
            if cp > 1
            else [sys.executable]
        )
        words = ["--rank", str(cp), how, "--sequence", str(sequence), "--steps", str(steps)]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [*launch, __file__, *words], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        figures = json.loads(done.stdout.splitlines()[-1])
        whole = whole or figures["kept_MB"]
        yield (
            f"cp {cp}, {how}" if cp > 1 else "one process",
            {**figures, "kept_share": round(figures["kept_MB"] / whole, 3)},
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        figures = rank(int(words.rank[0]), words.rank[1], words.sequence, words.steps)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(figures))
        return
    for name, figures in measure(words.sequence, words.steps):
        if words.json:
            print(json.dumps({"layout": name, **figures}), flush=True)
        else:
            print(
                f"{name:<20}" + "".join(f"{label} {value:<10}" for label, value in figures.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
