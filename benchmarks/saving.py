"""The cost of saving beside the model: time, and the most anonymous memory that each rank adds. CPU, gloo, bf16,
distributed optimizer.

    python benchmarks/saving.py [--format torch|torch_dist] [--ranks 2] [--async-save] [--layers 8] [--json]

A Llama of width 768 and 16,384 words, whose fresh state is saved twice. Times are the second save's. RssAnon of
/proc/self/status is sampled every 2 ms; held: before the first snapshot; added: the most above that, until the second is on disk.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.snapshot import dist_snapshot
from megatron_lite.checkpoint.state import Progress, param_groups
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

SIZES = {
    "hidden": 768, "attention.heads": 12, "attention.kv_heads": 12, "attention.head_dim": 64, "mlp.ffn": 2048, "vocab": 16384,
    "max_positions": 512, "norm.epsilon": 1e-5, "positions.theta": 1e4,
}  # fmt: skip
MIB = 1 << 20


def anonymous_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


class Peak:
    """The most anonymous memory while it is open."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def rank(given: Namespace) -> list[dict[str, float]]:
    """The figures of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = from_fields("llama", {**SIZES, "layers.count": given.layers})
    grid = make_grid(Layout(stage_layers=(given.layers,)), given.ranks, torch.device("cpu"))
    engine = Engine(
        config, grid, ModelOptions("bfloat16", vocab_divisor=1), OptimizerOptions(distributed=True)
    )
    init_weights(engine, 0.02, 0)
    groups = param_groups(Settings(), Progress(), (1e-3, 0.1, None))
    common = {
        "args": Namespace(),
        "iteration": 1,
        "optimizer": {"optimizer": {"param_groups": groups}},
    }
    take = rank_snapshot if given.format == "torch" else dist_snapshot
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        shared = [place]
        dist.broadcast_object_list(shared)
        group = dist.new_group(backend="gloo")
        saver = Saver(
            Path(shared[0]), given.format, dist.get_rank(), group, {}, asynchronous=given.async_save
        )
        with Peak() as peak:
            for _ in range(2):
                dist.barrier()
                begun = time.perf_counter()
                saver.save(take(engine, common, with_optimizer=True, impl="transformer_engine"))
                asked = time.perf_counter() - begun
                saver.finish()
                took = time.perf_counter() - begun
    found = {
        "seconds": round(took, 2), "blocked_s": round(asked, 2), "held_mib": round(peak.before / MIB),
        "added_mib": round((peak.most - peak.before) / MIB),
    }  # fmt: skip
    gathered: list[dict[str, float]] = [{}] * given.ranks
    dist.all_gather_object(gathered, found)
    dist.destroy_process_group()
    return gathered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=("torch", "torch_dist"), default="torch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument(
        "--directory",
        help="where checkpoints of the measurement grow; the system's place for such things",
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(given.ranks),
        ]
        raise SystemExit(
            subprocess.run([sys.executable, *launcher, __file__, *sys.argv[1:]]).returncode
        )
    figures = rank(given)
    if os.environ["RANK"] != "0":
        return
    if given.json:
        print(json.dumps(figures))
        return
    for number, of_rank in enumerate(figures):
        print(
            f"rank {number}  {of_rank['seconds']:>6.2f} s, of which {of_rank['blocked_s']:.2f} s blocked   "
            f"held {of_rank['held_mib']:,} MiB   added {of_rank['added_mib']:,} MiB"
        )


if __name__ == "__main__":
    main()
