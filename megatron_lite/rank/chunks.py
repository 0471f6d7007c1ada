"""Builds a rank's chunks of a model on the meta device, with their adapters, and allocates parameters without gradients."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.build_plan import ExpertRanks, Plan, make_plan
from megatron_lite.models.lora.attached import attach, attach_rows
from megatron_lite.models.lora.targets import check_targets
from megatron_lite.models.network_by_family import network
from megatron_lite.models.network_interface import Network
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.parameter_kinds import declared
from megatron_lite.parallel.parameters import (
    ParameterInfo,
    adapter_info,
    can_rest,
    is_head,
    parameter_infos,
    replace_parameter,
    rows_info,
)
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.products.selection import check_device, fp8_of_device
from megatron_lite.settings.options import LoRA, ModelOptions


class Built(NamedTuple):
    """A rank's chunks: virtual stages in order. Each list has one entry per chunk."""

    chunks: list[Network]
    infos: list[list[ParameterInfo]]
    """The parameters of each chunk."""
    adapters: list[list[ParameterInfo]]
    """The adapters of each chunk if only adapters are trained; empty lists if not."""
    sizes: dict[str, int]
    """This rank's sizes, such as its number of heads."""


def build_chunks(
    config: ModelConfig,
    grid: Grid,
    options: ModelOptions,
    *,
    trains_mtp: bool = True,
    trains_head: bool = True,
) -> Built:
    """Build the chunks on the meta device, with adapters if these are trained. Collective with adapters.

    trains_mtp: False if MTP layers keep their values. trains_head: False if a head that isn't tied keeps its values.
    """
    tp, lora = grid.layout.tp, options.lora
    check_device(options.fp8, grid.device, tp)
    options = replace(options, fp8=fp8_of_device(options.fp8, grid.device))
    sequence = options.sequence_parallel and tp > 1
    ranks = TensorGroup(grid.group("tp"), grid.tp_rank, tp, sequence)
    experts = ExpertRanks(experts=grid.group("ep"), parts=grid.group("etp"))
    plan = make_plan(config, grid.layout, options, ranks, experts)
    built = Built([], [], [], plan.sizes)
    found_adapters = False
    for index, chunk in enumerate(grid.chunks()):
        with torch.device("meta"):
            module = network(config)(plan, chunk)
        infos = _infos(module, plan, grid, index, chunk)
        adapters: list[ParameterInfo] = []
        if lora is not None:
            adapters = _attach_adapters(module, infos, plan, index, lora)
            found_adapters |= bool(adapters)
            adapters += _attach_rows(module, infos, plan, lora)
        built.chunks.append(module)
        if not trains_mtp:
            infos = _resting(infos, lambda info: can_rest(info.name, info.kind))
        if not trains_head and not config.tie_embeddings:
            infos = _resting(infos, lambda info: is_head(info.name))
        built.infos.append(infos)
        built.adapters.append(adapters)
    if lora is not None:
        check_targets(config, lora.targets, found=_anywhere(found_adapters, grid))
    return built


def _resting(
    infos: Iterable[ParameterInfo], rests: Callable[[ParameterInfo], bool]
) -> list[ParameterInfo]:
    """Return the parameters, of which some keep their values without gradients and optimizer state."""
    return [replace(info, rests=True, frozen=True) if rests(info) else info for info in infos]


def _anywhere(found: bool, grid: Grid) -> bool:
    """Return whether any rank has found something, as only some stages may have adapters. Collective."""
    flag = torch.tensor(float(found), device=grid.device)
    comm.largest(flag, grid.group("world"))
    return bool(flag)


def _infos(
    module: Network, plan: Plan, grid: Grid, index: int, chunk: Chunk
) -> list[ParameterInfo]:
    """Return the parameters of a chunk. index: its number on this rank."""
    infos = parameter_infos(
        declared(module),
        plan.config,
        grid,
        index,
        chunk,
        plan.vocab_rows,
        sequence=plan.ranks.sequence,
        frozen=module.is_frozen,
        local_layers=plan.options.local_layers,
    )
    return list(infos)


def _attach_adapters(
    module: Network, infos: Sequence[ParameterInfo], plan: Plan, index: int, lora: LoRA
) -> list[ParameterInfo]:
    """Add adapters to a chunk and return their parameters."""
    ranks = plan.ranks
    natives = [info.native for info in infos]
    with torch.device("meta"):
        trains = plan.options.trains
        made = list(attach(module, natives, plan.config, lora, ranks, trains=trains))
    found = []
    for native, declaration in made:
        info = adapter_info(index, native, declaration, ranks.size, sequence=ranks.sequence)
        found.append(info)
    return found


def _attach_rows(
    module: Network, infos: Sequence[ParameterInfo], plan: Plan, lora: LoRA
) -> list[ParameterInfo]:
    """Add trained rows of single tokens to a chunk and return their parameters."""
    named = {info.name: info for info in infos}
    natives = [info.native for info in infos]
    found = attach_rows(module, natives, plan, lora)
    ranks = plan.ranks
    return [
        rows_info(named[each.matrix.name], each.rows, ranks.size, sequence=ranks.sequence)
        for each in found
    ]


def allocate_untrained(
    built: Built, dtype: torch.dtype, device: torch.device, *, evaluates: bool, frozen: bool = True
) -> None:
    """Allocate the parameters that have no gradient: all of them if the engine only evaluates.

    frozen: False if the buckets hold the parameters that are frozen because only adapters are trained.
    """
    for module, infos, adapters in zip(built.chunks, built.infos, built.adapters, strict=True):
        for info in (*infos, *adapters):
            if info.trained and not evaluates:
                continue
            if info.frozen and not frozen:
                continue
            zeros = torch.zeros(info.native.shape, dtype=dtype_of(info, dtype), device=device)
            parameter = nn.Parameter(zeros, requires_grad=False)
            replace_parameter(module, info.name, parameter)


def dtype_of(info: ParameterInfo, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter: the model's, or float32 if its module declares that."""
    return torch.float32 if info.in_float32 else dtype
