"""The check before a run of `--guide`: whether its memory fits, and what would fit."""

import os
from pathlib import Path

import torch

from megaconv.commands.units import readable
from megaconv.errors import CheckpointError, UsageError
from megatron_lite.objectives.training_data import Setup
from megatron_lite.planning.memory import stage_memory
from megatron_lite.planning.stages import Described
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.run_options import optimizer_options

RANK = 16
"""Rank of the suggested adapters."""
MOST_RANKS = 1024


def check_fits(setup: Setup, options: ModelOptions) -> None:
    """Raise UsageError if this rank's memory is too small, with commands that fit. Adapters are not checked."""
    settings = setup.settings
    if not settings.logging.guide or settings.lora.wanted or setup.config.encoder.layers:
        return
    described = Described(setup.config, setup.sizes, options, optimizer_options(settings))
    try:
        needed = max(memory.total for memory in stage_memory(described))
    except CheckpointError:
        return  # the planner doesn't know the layers; the run will show
    free = free_bytes(setup.place.device)
    if free is not None and needed > free:
        raise UsageError(_too_large(setup, needed, free))


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of this process's device; None if it is unknown. Processes of a node share its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024 // processes
    return None


def _too_large(setup: Setup, needed: int, free: int) -> str:
    settings = setup.settings
    data = (settings.data.finetune_data or settings.data.data_path or ("DATA",))[0]
    save = settings.checkpointing.save
    saved = f" --save {save}" if save else ""
    short = f"finetune {settings.checkpointing.load} {data}{saved}"
    ranks = min(MOST_RANKS, _power_of_two(-(-needed // free)) * setup.place.world * 2)
    sharded = "--data-parallel-sharding-strategy optim_grads_params"
    return (
        f"training all weights takes about {readable(needed)} on each rank, and {readable(free)} are free; "
        f"train adapters: `megatron-lite {short} --lora-rank {RANK}`, or more ranks: "
        f"`torchrun --nproc-per-node {ranks} -m megatron_lite {short} {sharded}`"
    )


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length()
