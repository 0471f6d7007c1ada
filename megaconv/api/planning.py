"""The functions of the Python interface that plan a run or a server."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.called import checked
from megaconv.commands.best_layouts import BestLayouts
from megaconv.commands.inspection import inspect
from megaconv.commands.layouts import Layouts, layouts
from megaconv.commands.searched_layouts import layouts_for_serving, layouts_for_training
from megaconv.commands.served_layouts import ServedLayouts
from megaconv.errors import UsageError
from megaconv.model.ceilings import COUNT
from megaconv.model.ir import Header
from megaconv.options import LoadOptions
from megaconv.options.option import built
from megaconv.options.values import byte_size
from megaconv.planning.gpus import DEFAULT_GPU

_COUNTS = ("gpus", "seq_length", "global_batch_size", "sequences", "top")
_SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp", "micro_batch_size")


@checked
def plan(
    path: str | Path,
    *,
    gpus: int | None = None,
    gpu_memory: int | str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
) -> Layouts:
    """The parallel layouts that a model can have, the share of each rank, and the memory that training takes.

    gpus: the number of GPUs of the run; None: as few as can hold the model once.
    gpu_memory: the memory of one GPU in bytes, or text with a unit. tp, pp, ep, etp: only layouts with this size.
    Raises megaconv.errors.CheckpointError.
    """
    given = locals()
    header = _header(path, loader, given)
    return layouts(header, gpus, _bytes(gpu_memory), _fixed(given))


@checked
def plan_training(
    path: str | Path,
    *,
    gpus: int,
    gpu: str = DEFAULT_GPU,
    gpu_memory: int | str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    lora: bool = False,
    fp8: bool = False,
    moe_token_dispatcher_type: str = "alltoall",
    overlap_moe_expert_parallel_comm: bool = False,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    cp: int | None = None,
    micro_batch_size: int | None = None,
    top: int = 10,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
) -> BestLayouts:
    """The layouts of a training run, the one with the shortest estimated step first.

    gpu: the kind of GPU, such as h100. gpu_memory: its memory in bytes, or text with a unit; None: the kind's memory.
    seq_length: tokens of a sequence; None: as many as the model allows, at most 4096.
    global_batch_size: sequences of a step; None: one for each GPU. lora: only adapters are trained.
    tp, pp, vpp, ep, etp, cp, micro_batch_size: only layouts with this size. top: the number of layouts in the result.
    Raises megaconv.errors.CheckpointError.
    """
    given = locals()
    return layouts_for_training(
        _header(path, loader, given),
        gpus=gpus,
        gpu=gpu,
        gpu_memory=_bytes(gpu_memory),
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        fixed=_fixed(given),
        top=top,
        fp8=fp8,
        adapters=lora,
        overlap_experts=overlap_moe_expert_parallel_comm,
        dispatcher=moe_token_dispatcher_type,
    )


@checked
def plan_serving(
    path: str | Path,
    *,
    gpus: int | None = None,
    gpu: str = DEFAULT_GPU,
    gpu_memory: int | str | None = None,
    seq_length: int | None = None,
    sequences: int | None = None,
    fp8: bool = False,
    kv_cache_dtype: str = "auto",
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    top: int = 10,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
) -> ServedLayouts:
    """The layouts of an inference server, the one that generates the most tokens in a second first.

    gpus: None: as few as hold the model. gpu, gpu_memory, top: see plan_training.
    seq_length: tokens of a sequence with its prompt; None: as many as the model allows, at most 4096.
    sequences: sequences that are served at the same time; None: as many as fit. kv_cache_dtype: auto or fp8.
    tp, pp, ep: only layouts with this size. Raises megaconv.errors.CheckpointError.
    """
    given = locals()
    return layouts_for_serving(
        _header(path, loader, given),
        gpus=gpus,
        gpu=gpu,
        gpu_memory=_bytes(gpu_memory),
        seq_length=seq_length,
        sequences=sequences,
        fixed=_fixed(given),
        top=top,
        fp8=fp8,
        cache=kv_cache_dtype,
    )


def _header(path: str | Path, loader: str | None, given: Mapping[str, Any]) -> Header:
    """The model's description. given: a function's arguments by name. Raises UsageError for a count out of range."""
    for name in (*_COUNTS, *_SIZES):
        count = given.get(name)
        if count is not None and not 1 <= count <= COUNT:
            raise UsageError(f"{name}={count}: expected 1 to {COUNT:,}")
    read = replace(built(LoadOptions, "plan", given), optimizer=False)
    return inspect(path, read, loader, check_source=False).header


def _bytes(memory: int | str | None) -> int | None:
    return None if memory is None else byte_size(memory, "gpu_memory=")


def _fixed(given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that every layout must have."""
    sizes = {name: given.get(name) for name in _SIZES}
    # The search calls the size of a microbatch by its own name.
    sizes["micro_batch"] = sizes.pop("micro_batch_size")
    return {name: size for name, size in sizes.items() if size is not None}
