"""Tokens per second of generation with drafts of an MTP layer, and without, on a small model that has learned text.

    python benchmarks/drafting.py [--steps 300] [--rounds 7] [--new-tokens 96] [--json]

A MiMo of 8 layers of 256 and one MTP layer (7 million parameters) learns the bytes of the documentation of this repository,
in float32 on one thread. Then it continues texts of 64 bytes that it has not learned: one row and eight, greedily and with
temperature 1. Contenders take turns, so that a busy machine is busy for each: no drafts, and 1, 2 and 3 drafted tokens for
each step. Figures are medians of rounds: tokens per second of the processor's time and of elapsed time, and tokens a step.
All answers are equal.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import generate
from megatron_lite.inference.drafting_model import DraftingModel
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

DOCS = Path(__file__).parents[1] / "docs"
PROMPT, LONGEST = 64, 256
ROWS, SEQUENCE = 8, 128
BATCHES, TEMPERATURES, DRAFTS = (1, 8), (0.0, 1.0), (0, 1, 2, 3)
FIELDS = {
    "layers.count": 8, "hidden": 256, "mlp.ffn": 688, "attention.heads": 8, "attention.kv_heads": 4, "attention.head_dim": 32,
    "attention.qkv_bias": True, "vocab": 256, "max_positions": LONGEST, "norm.epsilon": 1e-5, "positions.theta": 10000.0, "mtp_layers": 1,
}  # fmt: skip


def texts() -> tuple[Tensor, Tensor]:
    """The bytes to learn, and those to continue."""
    whole = b"\n".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    data = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    end = len(data) * 9 // 10
    return data[:end], data[end:]


def trained(config: ModelConfig, data: Tensor, steps: int) -> Engine:
    layout = Layout(1, 1, 1, 1, stage_layers=split_layers(config.layer_count, 1, 1, LayerSplit()))
    grid = make_grid(layout, 1, torch.device("cpu"))
    options = ModelOptions(dtype="float32", mtp_loss_scale=0.3)
    engine = Engine(config, grid, options, OptimizerOptions(betas=(0.9, 0.95), clip_grad=1.0))
    init_weights(engine, std=0.02, seed=1)
    generator = torch.Generator().manual_seed(2)
    for number in range(steps):
        starts = torch.randint(len(data) - SEQUENCE - 1, (ROWS, 1), generator=generator)
        rows = data[starts + torch.arange(SEQUENCE + 1)]
        rate = 2e-3 * min(1.0, (number + 1) / 20) * (1 - number / steps)
        report = engine.train_step([Microbatch(rows[:, :-1], rows[:, 1:])], lr=max(rate, 1e-5))
        if number % 50 == 49:
            print(f"step {number + 1}: loss {report.loss:.3f}, {report.others}", flush=True)
    engine.finish()
    return engine


def measured(engine: Engine, data: Tensor, given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for batch, temperature in product(BATCHES, TEMPERATURES):
        models: dict[int, EngineModel] = {
            drafts: DraftingModel(engine, batch, LONGEST, drafts)
            if drafts
            else EngineModel(engine, batch, LONGEST)
            for drafts in DRAFTS
        }
        times: dict[int, list[tuple[float, float]]] = {drafts: [] for drafts in DRAFTS}
        for number in range(given.rounds + 1):
            sampling = Sampling(temperature, seed=number)
            wanted = requests(data, batch, number, given.new_tokens, sampling)
            answers = []
            for drafts, model in models.items():
                processor, elapsed = time.process_time(), time.perf_counter()
                answers.append([answer.tokens for answer in generate(model, wanted)])
                used = time.process_time() - processor, time.perf_counter() - elapsed
                if number:  # the first round is the warm-up
                    times[drafts].append(used)
            assert all(answer == answers[0] for answer in answers), "drafts have changed an answer"
        count = batch * given.new_tokens
        for drafts, model in models.items():
            processor, elapsed = (
                statistics.median(column) for column in zip(*times[drafts], strict=True)
            )
            a_step = model.counts.tokens_a_step if isinstance(model, DraftingModel) else 1.0
            line = {
                "rows": batch,
                "temperature": temperature,
                "drafts": drafts,
                "tokens a step": round(a_step, 2),
                "tokens/s of processor": round(count / processor, 1),
                "tokens/s elapsed": round(count / elapsed, 1),
            }
            found.append(line)
    return found


def requests(
    data: Tensor, batch: int, seed: int, new_tokens: int, sampling: Sampling
) -> Sequence[Request]:
    generator = torch.Generator().manual_seed(100 + seed)
    starts = torch.randint(len(data) - PROMPT, (batch, 1), generator=generator)
    rows = data[starts + torch.arange(PROMPT)].tolist()
    return [Request(tuple(row), new_tokens, sampling) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    learned, held_out = texts()
    config = from_fields("mimo", FIELDS)
    engine = trained(config, learned, given.steps)
    for line in measured(engine, held_out, given):
        print(json.dumps(line) if given.json else "  ".join(f"{k} {v}" for k, v in line.items()))


if __name__ == "__main__":
    main()
