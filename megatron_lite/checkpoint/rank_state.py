"""What a rank file of a `torch` checkpoint holds, as Megatron's own: a model, its optimizer, and what isn't a tensor.

The optimizer is whole in it, also where ranks share it: the file's tensors then have parts on all of them (rank_file.py).
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from formats import rank_files
from formats.pickle_records import TorchDtype
from formats.pickle_writer import Constant, Placeholder
from megaconv.families import family
from megaconv.megatron.arguments.param_groups import Class, class_of, is_expert
from megaconv.megatron.states.names import core_order, extra_states
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import core_naming
from megaconv.model.natives import native_tensors
from megatron_lite.checkpoint.rank_file import Part, RankFile, SharedTensor
from megatron_lite.checkpoint.snapshot import NAMING, Snapshot
from megatron_lite.engine import Engine
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.mesh import expert_mesh
from megatron_lite.parallel.zero import STATE, FlatRange, Share, kind_of

Name = tuple[int, str]
"""(chunk, name in the file)."""
Slots = Mapping[Name, Mapping[str, SharedTensor]]
"""Optimizer state by parameter and slot."""


def rank_snapshot(engine: Engine, common: Mapping[str, Any], *, with_optimizer: bool, impl: str) -> Snapshot:
    """Of `torch`. impl: whose modules are listed, transformer_engine or local.

    As in Megatron those ranks write that are the first of all that hold the same experts.
    """
    engine.finish()
    grid, mixture = engine.grid, engine.config.experts.count > 0
    renamed = [_listed(engine, chunk, impl) for chunk in grid.chunks()]
    slots = _slots(engine, renamed) if with_optimizer else {}
    states = [tensor for of_parameter in slots.values() for tensor in of_parameter.values()]
    if not _writes(grid, grid.rank, mixture=mixture):
        return Snapshot(common["iteration"], common, rank_file=RankFile(None, None, tuple(states)))
    order = core_order(family(engine.config.family).rows, core_naming(impl))
    models = [
        OrderedDict(sorted(of_chunk.items(), key=lambda entry: order(entry[0])))
        for of_chunk in _weights(engine, renamed)
    ]
    state = {name: plain(value) for name, value in common.items()}
    if slots:
        listed = [(chunk, name) for chunk, model in enumerate(models) for name in model if (chunk, name) in slots]
        state["optimizer"] = _optimizers(state["optimizer"], listed, models, slots, apart=grid.layout.ep > 1)
    for chunk, model in enumerate(models):
        entries: dict[str, Any] = {name: tensor.placeholder for name, tensor in model.items()}
        entries |= dict.fromkeys(extra_states(model), None)
        key = "model" if len(models) == 1 else f"model{chunk}"
        state[key] = OrderedDict(sorted(entries.items(), key=lambda entry: order(entry[0])))
    ep_rank = grid.rank_along("ep") if mixture else 0
    directory = rank_files.rank_directory(grid.tp_rank, grid.pp_rank, ep_rank, grid.layout.pp, grid.layout.ep)
    weights = [tensor for model in models for tensor in model.values()]
    file = RankFile(f"{directory}/{rank_files.MODEL_FILE}", state, (*weights, *states))
    return Snapshot(common["iteration"], common, rank_file=file)


class Listed(NamedTuple):
    """How a file calls a parameter."""

    name: str
    unused: tuple[str, ...]
    """As what it is listed again, with optimizer state: a tied head beside MTP layers, which Megatron never computes with."""


def _listed(engine: Engine, chunk: Chunk, impl: str) -> dict[str, Listed]:
    """By the engine's names."""
    config, grid = engine.config, engine.grid
    vocab_rows = padded_vocab(config.vocab, engine.options.vocab_divisor, grid.layout.tp)
    at = grid.experts_place() if config.experts.count else (0, 0)
    ours, theirs = (
        list(
            native_tensors(
                family(config.family).rows, config, naming, grid.layout, grid.tp_rank, chunk, vocab_rows, *at
            )
        )
        for naming in (NAMING, core_naming(impl))
    )
    unused = [native for native in theirs if native.copy is not None and native.copy.written and not native.copy.used]
    return {
        our.name: Listed(their.name, tuple(native.name for native in unused if native.parts == our.parts))
        for our, their in zip(ours, theirs, strict=True)
    }


def _writes(grid: Grid, rank: int, *, mixture: bool) -> bool:
    """Whether this one of all ranks has a file."""
    if mixture:
        return not expert_mesh(grid.layout, grid.dp, grid.cp).place(rank)["edp"]
    place = grid.mesh.place(rank)
    return not place["cp"] and not place["dp"]


def _weights(engine: Engine, renamed: list[dict[str, Listed]]) -> list[dict[str, SharedTensor]]:
    """Of each chunk by name; whole on this rank."""
    models: list[dict[str, SharedTensor]] = [{} for _ in renamed]
    second_names = {(info.chunk, info.name): info.second_names for infos in engine.infos for info in infos}
    for chunk, name, tensor in engine.parameters():
        names = [renamed[chunk][each].name for each in (name, *second_names[chunk, name])]
        for each in (*names, *renamed[chunk][name].unused):
            placeholder = Placeholder(f"{chunk} {each}", tuple(tensor.shape), _dtype(tensor.dtype))
            whole = Part(engine.grid.rank, 0, tensor.numel(), tensor.detach().view(-1))
            models[chunk][each] = SharedTensor(placeholder, (whole,), (engine.grid.rank,))
    return models


def _slots(engine: Engine, renamed: list[dict[str, Listed]]) -> dict[Name, dict[str, SharedTensor]]:
    """In the same order on all ranks that share the optimizer of any of these parameters, also on one that owns nothing.

    Of an optimizer that isn't shared those that this rank writes.
    """
    optimizer, grid, mixture = engine.optimizer, engine.grid, engine.config.experts.count > 0
    assert optimizer is not None
    if not optimizer.distributed and not _writes(grid, grid.rank, mixture=mixture):
        return {}
    own = {(owned.chunk, owned.name): owned for owned in optimizer.ranges()}
    masters = () if engine.dtype == torch.float32 else ("master",)  # in fp32 the weights themselves
    found: dict[Name, dict[str, SharedTensor]] = {}
    for info, shares in optimizer.shares():
        group = grid.group(info.reduced_over) if optimizer.distributed else None
        ranks = [grid.rank] if group is None else dist.get_process_group_ranks(group)
        writers = tuple(rank for rank in ranks if _writes(grid, rank, mixture=mixture))
        owned = own.get((info.chunk, info.name))
        listed = renamed[info.chunk][info.name]
        for name in (listed.name, *listed.unused):
            found[info.chunk, name] = {
                slot: SharedTensor(
                    Placeholder(f"{info.chunk} {slot} {name}", info.native.shape, "float32"),
                    tuple(_part(share, ranks, grid.rank, slot, owned) for share in shares), writers,
                )
                for slot in (*masters, *STATE[kind_of(info, optimizer.options.kind)])
            }  # fmt: skip
    return found


def _part(share: Share, ranks: list[int], rank: int, slot: str, owned: FlatRange | None) -> Part:
    """ranks: that share the optimizer. rank: this one, which owns this range, if any."""
    has = ranks[share.rank]
    return Part(has, share.start, share.end, owned.tensors[slot].detach() if has == rank and owned else None)


def plain(value: Any) -> Any:
    """What a torch file's writer takes: small tensors with their bytes, dtypes by name."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return Constant(tuple(value.shape), _dtype(value.dtype), content)
    if isinstance(value, torch.dtype):
        return TorchDtype(_dtype(value))
    if isinstance(value, Namespace):
        return Namespace(**plain(vars(value)))
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _optimizers(
    groups: Mapping[str, Any],
    listed: list[Name],
    models: list[OrderedDict[str, SharedTensor]],
    slots: Slots,
    *,
    apart: bool,
) -> Any:
    """One, or with expert parallelism (apart) a list of two: experts have one of their own."""
    if not apart:
        return _optimizer_state(groups, listed, models, slots)
    dense, experts = ([key for key in listed if is_expert(key[1]) == of_experts] for of_experts in (False, True))
    theirs = [{**group, "is_expert_parallel": True} for group in groups["optimizer"]["param_groups"]]
    of_experts = {**groups, "optimizer": {**groups["optimizer"], "param_groups": theirs}}
    return [
        _optimizer_state(groups, dense, models, slots),
        _optimizer_state(of_experts, experts, models, slots),
    ]


def _optimizer_state(
    groups: Mapping[str, Any],
    listed: list[Name],
    models: list[OrderedDict[str, SharedTensor]],
    slots: Slots,
) -> dict[str, Any]:
    """Megatron's Float16OptimizerWithFloat16Params, or its FP32Optimizer, whose masters are the weights themselves.

    groups: common_state's optimizer. listed: parameters in the order of the model.
    """
    by_class = {
        Class(group["wd_mult"] != 0, not group["default_config"]): (group, list[Name]())
        for group in groups["optimizer"]["param_groups"]
    }
    decoupled = any(each.decoupled for each in by_class)
    for chunk, name in listed:
        its_class = class_of(name, models[chunk][name].placeholder.shape, decoupled=decoupled)
        by_class[its_class][1].append((chunk, name))
    used = [(group, keys) for group, keys in by_class.values() if keys]
    by_group = [keys for _, keys in used]
    numbers = {key: number for number, key in enumerate(key for group in by_group for key in group)}
    param_groups = [{**group, "params": [numbers[key] for key in keys]} for group, keys in used]
    counter = {"step": plain(torch.tensor(float(param_groups[0]["step"])))}
    state = {
        numbers[key]: {slot: tensor.placeholder for slot, tensor in slots[key].items() if slot != "master"}
        | (counter if "exp_avg" in slots[key] else {})
        for keys in by_group
        for key in keys
    }
    inner = {"state": state, "param_groups": param_groups}
    if all(models[chunk][name].placeholder.dtype == "float32" for chunk, name in listed):
        return inner
    masters = [[slots[key]["master"].placeholder for key in keys] for keys in by_group]
    return {**groups, "optimizer": inner, "fp32_from_fp16_params": masters}
