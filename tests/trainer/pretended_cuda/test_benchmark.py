"""The benchmark of a GPU runs on the pretended one: its models train there, and its figures have their units."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.trainer.pretended_cuda.device import PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

SCRIPTS = str(Path(__file__).parents[3] / "benchmarks")
OF_MEMORY: dict[str, Any] = {
    "is_available": lambda: True,
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 5 * 10**9,
}
"""torch.cuda's functions that only the benchmark calls."""


def _measure(_rank: int, contender: str) -> dict[str, dict[str, Any]]:
    sys.path.insert(0, SCRIPTS)
    import on_gpu

    with PretendedGpu(), patch.multiple(torch.cuda, **OF_MEMORY):
        return {
            name: on_gpu.measure(contender, model, 1)
            for name, model in on_gpu.small_models().items()
            if contender in model.contenders
        }


def _check(found: dict[str, dict[str, Any]], models: int) -> None:
    assert len(found) == models
    for figures in found.values():
        assert figures["device"] == "NVIDIA H100 80GB HBM3"
        assert figures["tokens_per_second"] > 0
        assert 0 <= figures["mfu"] < 1
        assert figures["peak_GB"] == 5.0


def test_each_model_is_measured(gpu_world: PretendedWorld) -> None:
    """Llamas, one with adapters, and a mixture."""
    (found,) = gpu_world.run(1, _measure, "megatron_lite")
    _check(found, models=5)


@pytest.mark.slow
def test_fp8_is_measured_and_says_which_products_computed_it(gpu_world: PretendedWorld) -> None:
    (found,) = gpu_world.run(1, _measure, "megatron_lite, fp8")
    _check(found, models=3)
    assert {figures["fp8_products"] for figures in found.values()} == {"torch"}
