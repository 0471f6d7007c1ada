"""Time and memory of a LoRA step beside peft's, on the CPU in float32: a Llama of 25 million parameters, adapters of all linear layers.

    python benchmarks/lora.py [--steps 15] [--rank 16] [--tiny] [--json]          needs the package peft

Each contender is a process that takes one step in its turn, after two that don't count, so that a busy machine is busy for both.
Medians of all rounds, and of the ratio within a round. peak: the most that a process has held, torch and the model included; added: what
it has held above what it held before the first step. `keeping freed memory`: with the mallopt setting that the trainer makes on a CPU.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from turns import Figures, answer, rounds

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.processes.launch import keep_freed_memory
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions

CONTENDERS = ("megatron_lite", "peft", "peft, keeping freed memory")
WARM_UP, ROWS = 2, 2

Step = Callable[[], None]


def model(tiny: bool) -> ModelConfig:
    layers, hidden, heads, ffn, vocab, positions = (
        (2, 64, 4, 128, 256, 64) if tiny else (8, 384, 6, 1024, 16384, 512)
    )
    return from_fields(
        "llama",
        {
            "layers.count": layers, "hidden": hidden, "attention.heads": heads, "attention.kv_heads": heads,
            "attention.head_dim": hidden // heads, "mlp.ffn": ffn, "vocab": vocab, "max_positions": positions,
            "norm.epsilon": 1e-5, "positions.theta": 1e4,
        },
    )  # fmt: skip


def batch(config: ModelConfig) -> Microbatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (ROWS, config.max_positions + 1), generator=generator)
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def ours(config: ModelConfig, rank: int) -> Step:
    options = ModelOptions("float32", vocab_divisor=1, lora=LoRA(rank, 2.0 * rank))
    grid = make_grid(Layout(stage_layers=(config.layer_count,)), 1, torch.device("cpu"))
    engine = Engine(config, grid, options, OptimizerOptions())
    init_weights(engine, 0.02, 0)
    init_adapters(engine, 0)
    data = batch(config)
    return lambda: engine.train_step([data], 1e-4) and None


def theirs(config: ModelConfig, rank: int) -> Step:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        hidden_size=config.hidden, intermediate_size=config.mlp.ffn, num_hidden_layers=config.layer_count, vocab_size=config.vocab,
        num_attention_heads=config.attention.heads, num_key_value_heads=config.attention.kv_heads,
        max_position_embeddings=config.max_positions, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    network = get_peft_model(
        LlamaForCausalLM(settings),
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"),
    )
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer, data = torch.optim.AdamW(trained, lr=1e-4, fused=True), batch(config)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = network(data.tokens).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), data.labels.flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


def one(name: str, rank: int, tiny: bool) -> None:
    """A contender's own process: takes a step for each line that it is sent."""
    torch.manual_seed(0)
    if name != "peft":  # the trainer does so by itself
        keep_freed_memory()
    step = (ours if name == "megatron_lite" else theirs)(model(tiny), rank)
    before = _peak()
    for _ in range(WARM_UP):
        step()

    def turn() -> Figures:
        begun = time.perf_counter()
        step()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "peak": _peak(), "added": _peak() - before}

    answer(turn)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(steps: int, rank: int, tiny: bool) -> dict[str, Any]:
    commands = {
        name: [sys.executable, __file__, "--one", name, "--rank", str(rank), *["--tiny"] * tiny]
        for name in CONTENDERS
    }
    all_rounds, found = rounds(commands, steps), {}
    for name in CONTENDERS:
        ratios = [taken[name]["seconds"] / taken[CONTENDERS[0]]["seconds"] for taken in all_rounds]
        found[name] = {
            "step_ms": round(
                1e3 * statistics.median(taken[name]["seconds"] for taken in all_rounds), 1
            ),
            "times_ours": round(statistics.median(ratios), 2),
            "ratios": f"{min(ratios):.2f} to {max(ratios):.2f}",
            "peak_MB": round(all_rounds[-1][name]["peak"] / 1e6),
            "added_MB": round(all_rounds[-1][name]["added"] / 1e6),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        one(given.one, given.rank, given.tiny)
        return
    found = measure(given.steps, given.rank, given.tiny)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, figures in found.items():
        print(f"{name:<28}" + "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
