"""The check before a run of `--guide`: whether its memory fits, and what would fit."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from formats.tensor import ITEMSIZE
from megaconv.commands.units import readable
from megaconv.errors import CheckpointError, UsageError
from megaconv.planning.model_size import parameter_count
from megatron_lite.objectives.image_models import TEACHER_FLAG, multimodal_directory
from megatron_lite.objectives.training_data import Setup
from megatron_lite.planning.encoders import Encoder, encoder_of
from megatron_lite.planning.memory import stage_memory
from megatron_lite.planning.stages import Described
from megatron_lite.planning.work import work_of
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.run_options import optimizer_options
from megatron_lite.settings.sizes import work_out

RANK = 16
"""Rank of the suggested adapters."""
SHARDING, STRATEGY = "--data-parallel-sharding-strategy", "optim_grads_params"
MOST_RANKS = 1024


def check_fits(setup: Setup, options: ModelOptions, rows: int, images: Path | None = None) -> None:
    """Raise UsageError if this rank's memory is too small, with commands that fit.

    rows: sequences of a sample. images: the multimodal model that reads the data's images; None if there are none.
    """
    settings = setup.settings
    if not settings.logging.guide or setup.config.encoder.layers:
        return
    free = free_bytes(setup.place.device)
    if free is None:
        return
    try:
        needed = _needed(setup, options, rows, images)
    except CheckpointError:
        return  # the planner doesn't know the layers; the run will show
    if needed > free:
        raise UsageError(_too_large(setup, options, rows, images, needed, free))


def _needed(setup: Setup, options: ModelOptions, rows: int, images: Path | None) -> int:
    """Return the bytes of the rank that needs most. Raises CheckpointError for layers that the planner doesn't know."""
    settings = setup.settings
    work = replace(work_of(settings), rows=rows)
    optimizer = optimizer_options(settings)
    encoder = None if images is None else encoder_of(images)
    described = Described(setup.config, setup.sizes, options, optimizer, work, encoder=encoder)
    if setup.teacher is not None:
        of_teacher = None if images is None else _encoder_of_teacher(settings, setup.teacher.path)
        described = described.taught_by(setup.teacher.config, of_teacher)
    return max(memory.total for memory in stage_memory(described))


def _encoder_of_teacher(settings: Settings, teacher: str) -> Encoder | None:
    asked = settings.distilling.teacher_image_encoder
    directory = multimodal_directory(asked, teacher, TEACHER_FLAG)
    return None if directory is None else encoder_of(directory)


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


def _too_large(
    setup: Setup, options: ModelOptions, rows: int, images: Path | None, needed: int, free: int
) -> str:
    settings = setup.settings
    data = (settings.data.finetune_data or settings.data.data_path or ("DATA",))[0]
    save = settings.checkpointing.save
    saved = f" --save {save}" if save else ""
    objectives = (
        ("--dpo", settings.dpo.dpo),
        ("--kto", settings.kto.kto),
        ("--reward-modeling", settings.rewards.reward_modeling),
        ("--embedding", settings.embeddings.embedding),
        ("--distill-on-policy", settings.distilling.distill_on_policy),
        ("--lora-dora", settings.lora.lora_dora),
    )
    asked = "".join(f" {flag}" for flag, is_asked in objectives if is_asked) + _further_flags(
        settings
    )
    short = f"finetune {settings.checkpointing.load} {data}{asked}{saved}"
    choices = []
    trains_all = not settings.lora.wanted
    if trains_all and _weights(setup, options) < free:
        choices.append(f"train adapters: `megatron-lite {short} --lora-rank {RANK}`")
    ranks = _ranks_that_fit(setup, options, rows, images, free)
    if ranks is not None:
        launch = f"torchrun --nproc-per-node {ranks} -m megatron_lite"
        command = f"{launch} {short} {SHARDING} {STRATEGY}"
        choices.append(f"use {ranks} ranks with as much memory each: `{command}`")
    advice = ", or ".join(choices) or "take a smaller model, or devices with more memory"
    trained = "all weights" if trains_all else "adapters"
    return (
        f"training {trained} takes about {readable(needed)} on each rank, and {readable(free)} are free; "
        f"{advice}"
    )


def _further_flags(settings: Settings) -> str:
    """Return the flags of the run's teacher and adapters, with a space before each."""
    lora, teacher = settings.lora, settings.distilling.teacher_load
    found = {
        "--teacher-load": teacher,
        "--lora-rank": lora.lora_rank,
        "--lora-load": lora.lora_load,
    }
    return "".join(f" {flag} {value}" for flag, value in found.items() if value is not None)


def _weights(setup: Setup, options: ModelOptions) -> int:
    """Return about the bytes of one rank's weights, which adapters leave as they are."""
    layout = setup.sizes.layout
    parameters = parameter_count(setup.config) // (layout.tp * layout.pp)
    return parameters * ITEMSIZE[options.dtype]


def _ranks_that_fit(
    setup: Setup, options: ModelOptions, rows: int, images: Path | None, free: int
) -> int | None:
    """Return a number of ranks on which the run fits, each with as much free memory as this one.

    Returns None if there is none up to MOST_RANKS.
    """
    settings = setup.settings
    parallel = replace(settings.parallel, data_parallel_sharding_strategy=STRATEGY)
    training = replace(settings.training, global_batch_size=None)
    sharded = replace(settings, parallel=parallel, training=training)
    ranks = 2 * setup.place.world
    while ranks <= MOST_RANKS:
        try:
            sizes = work_out(sharded, setup.config, options, ranks)
            on_more = replace(setup, settings=sharded, sizes=sizes)
            needed = _needed(on_more, options, rows, images)
        except CheckpointError:
            return None
        if needed <= free:
            return ranks
        ranks *= 2
    return None
