"""Speed, MFU and memory of one trainer on one GPU: what `trainer.py gpu` starts for each model and contender.

    python benchmarks/on_gpu.py MODEL CONTENDER [--steps 15] [--tiny]

The process prints one JSON object. With --tiny, models are small, and a machine without a GPU takes its CPU: for tests.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from contenders import Step, core_step, model, ours, transformers_step

from megaconv.model.config import ModelConfig
from megaconv.model.fields import fields_of, from_fields
from megaconv.planning.gpus import peak_tflops
from megatron_lite.loop.log import flops_per_token
from megatron_lite.products.transformer_engine import has_transformer_engine
from megatron_lite.settings.options import FP8, LoRA, OptimizerOptions, Recompute

WARM_UP = 3
VOCAB = 128256
SEQUENCE = 4096


@dataclass(frozen=True)
class Model:
    """A model, and the way it is trained."""

    config: ModelConfig
    rows: int
    """Sequences of a step."""
    options: dict[str, Any]
    """Further options of megatron_lite."""
    contenders: tuple[str, ...]

    @property
    def adapters_only(self) -> bool:
        return "lora" in self.options


NARROW, MASTERS = "megatron_lite, compiled, bf16 state", "transformers, compiled, autocast"
"""Ours with moments and gradients in bf16, and transformers with float32 weights: each keeps about what the other usually does."""
OURS = ("megatron_lite, compiled", "megatron_lite")
WITHOUT_CORE = (
    "megatron_lite, compiled",
    "transformers, compiled",
    NARROW,
    MASTERS,
    "megatron_lite",
)
DENSE = (
    "megatron_lite, compiled", "transformers, compiled", NARROW, MASTERS, "megatron_lite, fp8", "megatron-core", "megatron_lite",
)  # fmt: skip
ADAPTERS = (*OURS, "transformers and peft, compiled")
ALL = tuple(dict.fromkeys((*DENSE, *ADAPTERS)))
"""In the order in which they are measured."""


def _mixture(layers: int, experts: int) -> ModelConfig:
    """Return a mixture with OLMoE's shapes: of 64 experts, a token goes to 8."""
    dense = model(layers, 2048, 16, 16, 1024, 50304, SEQUENCE)
    of_experts = {
        "layers.mlp": "experts",
        "experts.count": experts,
        "experts.per_token": 8,
        "experts.ffn": 1024,
    }
    return from_fields("mixtral", fields_of(dense) | of_experts)


def models() -> dict[str, Model]:
    """Return the models by name, first those without recent figures. At 18 bytes a parameter, each fits into 80 GB."""
    eight = partial(model, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=VOCAB)
    lora = LoRA(rank=16, alpha=32.0)
    return {
        "8B with adapters (LoRA)": Model(
            eight(layers=32, positions=SEQUENCE), 1, {"lora": lora}, ADAPTERS
        ),
        "1B": Model(model(16, 2048, 32, 8, 8192, VOCAB, SEQUENCE), 4, {}, DENSE),
        "3B": Model(
            model(28, 3072, 24, 8, 8192, VOCAB, SEQUENCE, tied=True), 1,
            {"recompute": Recompute("selective")}, DENSE,
        ),
        "8 of the 32 layers of 8B": Model(eight(layers=8, positions=SEQUENCE), 2, {}, DENSE),
        "mixture of 4 layers, 64 experts": Model(_mixture(4, 64), 4, {}, WITHOUT_CORE),
    }  # fmt: skip


def small_models() -> dict[str, Model]:
    """Return models of the same kinds for a machine without a GPU."""
    dense = model(2, 64, 4, 2, 128, 256, 64)
    mixture = fields_of(dense) | {
        "layers.mlp": "experts", "experts.count": 4, "experts.per_token": 2, "experts.ffn": 64,
    }  # fmt: skip
    lora = {"lora": LoRA(rank=2, alpha=4.0)}
    found = {}
    for name, real in models().items():
        config = from_fields("mixtral", mixture) if "mixture" in name else dense
        options = lora if real.adapters_only else real.options
        found[name] = Model(config, 1, options, real.contenders)
    return found


BF16_STATE = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"), "bfloat16")
PACKAGES = {
    "transformers, compiled": "transformers",
    MASTERS: "transformers",
    "transformers and peft, compiled": "peft",
    "megatron-core": "megatron-core",
}
"""The package that a contender needs."""


def require_package(contender: str) -> None:
    """End the process if the package of the contender is not installed."""
    package = PACKAGES.get(contender)
    if package is None:
        return
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{package} is not installed: pip install {package}") from None


def step_of(contender: str, chosen: Model, device: torch.device) -> Step:
    """Return a contender's training step in bf16."""
    config, rows = chosen.config, chosen.rows
    more: dict[str, Any]
    if contender == "megatron-core":
        return core_step(config, "bfloat16", rows, device)
    if contender.startswith("transformers"):
        more = {"masters": contender == MASTERS, "lora": chosen.options.get("lora")}
        return transformers_step(config, "bfloat16", rows, device, compiled=True, **more)
    more = {
        "megatron_lite": {},
        "megatron_lite, compiled": {"compile": True},
        NARROW: {"compile": True, "optimizer": OptimizerOptions(**BF16_STATE)},
        "megatron_lite, fp8": {"fp8": FP8(recipe="tensorwise")},
    }[contender]
    return ours(config, "bfloat16", rows, device, **chosen.options, **more)


def measure(contender: str, chosen: Model, steps: int) -> dict[str, Any]:
    """Return the figures of one contender."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    settle: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    step = step_of(contender, chosen, device)
    for _ in range(WARM_UP):
        step()
    settle()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        settle()
        times.append(time.perf_counter() - begun)
    median = sorted(times)[len(times) // 2]
    figures = _figures(chosen, median, on_gpu=on_gpu)
    if contender == "megatron_lite, fp8":
        uses_engine = on_gpu and has_transformer_engine()
        figures["fp8_products"] = "Transformer Engine" if uses_engine else "torch"
    return figures


def _figures(chosen: Model, seconds: float, *, on_gpu: bool) -> dict[str, Any]:
    config = chosen.config
    speed = chosen.rows * config.max_positions / seconds
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    found: dict[str, Any] = {"device": name, "tokens_per_second": round(speed)}
    peak = peak_tflops(name)
    if peak is not None:
        each = flops_per_token(config, config.max_positions, frozen=chosen.adapters_only)
        found["mfu"] = round(speed * each / 1e12 / peak, 3)
    if on_gpu:
        found["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=models())
    parser.add_argument("contender", choices=ALL)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    chosen = (small_models() if args.tiny else models())[args.model]
    require_package(args.contender)
    print(json.dumps(measure(args.contender, chosen, args.steps)))


if __name__ == "__main__":
    main()
