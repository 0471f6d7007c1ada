"""Builds the content of a `torch` checkpoint's rank file in Megatron's form: model, optimizer, and values that are not tensors.

The file contains the whole optimizer state. If ranks share the optimizer, several ranks hold parts of its tensors
(rank_file.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from formats import rank_files
from formats.pickle_writer import Placeholder
from megaconv.families import family
from megaconv.megatron.states.names import core_order, extra_states
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import core_naming
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.model.training import MASTER
from megatron_lite.checkpoint.plain_values import dtype_name, plain
from megatron_lite.checkpoint.rank_file import Part, RankFile, SharedTensor
from megatron_lite.checkpoint.rank_optimizer import Name, Slots, optimizers
from megatron_lite.checkpoint.snapshot import NAMING, Snapshot
from megatron_lite.engine import Engine
from megatron_lite.optimizer.ranges import FlatRange, Share
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.mesh import expert_mesh
from megatron_lite.parallel.parameters import ParameterInfo

T = TypeVar("T")


def rank_snapshot(
    engine: Engine, common: Mapping[str, Any], *, with_optimizer: bool, impl: str
) -> Snapshot:
    """Return this rank's part of a `torch` checkpoint.

    impl: the module names in the file, `transformer_engine` or `local`. As in Megatron, a rank writes a file if it is
    the first of the ranks that hold the same experts.
    """
    engine.finish()
    grid = engine.grid
    mixture = engine.config.experts.count > 0
    renamed = [_listed(engine, chunk, impl) for chunk in grid.chunks()]
    slots = _slots(engine, renamed) if with_optimizer else {}
    tensors: list[SharedTensor] = []
    for of_parameter in slots.values():
        tensors += of_parameter.values()
    iteration = common["iteration"]
    writes = _writes(grid, grid.rank, mixture=mixture)
    unsorted = _weights(engine, renamed, kept=writes)
    if not writes:
        nothing = RankFile(None, None, tuple(tensors))
        return Snapshot(iteration, common, rank_file=nothing)
    rows = family(engine.config.family).rows
    order = core_order(rows, core_naming(impl))
    models = [_sorted(of_chunk, order) for of_chunk in unsorted]
    state = {name: plain(value) for name, value in common.items()}
    state["args"].rank = grid.rank
    if slots:
        expert_groups = grid.layout.ep > 1
        state["optimizer"] = _optimizer(
            state["optimizer"], models, slots, expert_groups=expert_groups
        )
    for chunk, model in enumerate(models):
        key = "model" if len(models) == 1 else f"model{chunk}"
        entries = _entries(model, has_scores=engine.config.has("scores"))
        state[key] = _sorted(entries, order)
    weights: list[SharedTensor] = []
    for model in models:
        weights += model.values()
    directory = _directory(grid, mixture=mixture)
    path = f"{directory}/{rank_files.MODEL_FILE}"
    file = RankFile(path, state, (*weights, *tensors))
    return Snapshot(iteration, common, rank_file=file)


def _optimizer(
    groups: Mapping[str, Any],
    models: list[OrderedDict[str, SharedTensor]],
    slots: Slots,
    *,
    expert_groups: bool,
) -> Any:
    """Return the optimizer's entry. Its parameters are in the order of the models."""
    listed: list[Name] = []
    for chunk, model in enumerate(models):
        listed += [(chunk, name) for name in model if (chunk, name) in slots]
    return optimizers(groups, listed, models, slots, expert_groups=expert_groups)


def _entries(model: Mapping[str, SharedTensor], *, has_scores: bool) -> dict[str, Any]:
    """Return the content of one chunk: its tensors, and the extra states, which are empty.

    has_scores: True if the model has a head of scores, which has no extra state.
    """
    tensors = {name: tensor.placeholder for name, tensor in model.items()}
    states = extra_states(model, has_scores=has_scores)
    return {**tensors, **dict.fromkeys(states, None)}


def _sorted(entries: Mapping[str, T], order: Callable[[str], Any]) -> OrderedDict[str, T]:
    """Return the entries in the order of their names."""
    names = sorted(entries, key=order)
    return OrderedDict((name, entries[name]) for name in names)


def _directory(grid: Grid, *, mixture: bool) -> str:
    """Return the name of this rank's directory."""
    ep_rank = grid.rank_along("ep") if mixture else 0
    return rank_files.rank_directory(
        grid.tp_rank, grid.pp_rank, ep_rank, grid.layout.pp, grid.layout.ep
    )


class Listed(NamedTuple):
    """The names of a parameter in a file."""

    name: str
    unused: tuple[str, ...]
    """More names of the same parameter, with optimizer state: a tied head next to MTP layers, which Megatron never uses."""


def _listed(engine: Engine, chunk: Chunk, impl: str) -> dict[str, Listed]:
    """Return the names in the file by the engine's parameter names."""
    config = engine.config
    grid = engine.grid
    layout = grid.layout
    vocab_rows = padded_vocab(config.vocab, engine.options.vocab_divisor, layout.tp)
    expert_place = grid.experts_place() if config.experts.count else (0, 0)
    at_rank = layout, grid.tp_rank, chunk, vocab_rows, *expert_place
    rows = family(config.family).rows
    ours = native_tensors(rows, config, NAMING, *at_rank)
    theirs = list(native_tensors(rows, config, core_naming(impl), *at_rank))
    unused = [native for native in theirs if _is_unused(native)]
    found = {}
    for our, their in zip(ours, theirs, strict=True):
        copies = tuple(native.name for native in unused if native.parts == our.parts)
        found[our.name] = Listed(their.name, copies)
    return found


def _is_unused(native: NativeTensor) -> bool:
    """Return whether Megatron writes the tensor but never computes with it."""
    copy = native.copy
    return copy is not None and copy.written and not copy.used


def _writes(grid: Grid, rank: int, *, mixture: bool) -> bool:
    """Return whether the given rank writes a file."""
    if mixture:
        return not expert_mesh(grid.layout, grid.dp, grid.cp).place(rank)["edp"]
    place = grid.mesh.place(rank)
    return not place["cp"] and not place["dp"]


def _weights(
    engine: Engine, renamed: list[dict[str, Listed]], *, kept: bool
) -> list[dict[str, SharedTensor]]:
    """Return the weights of each chunk by name in the file. Each weight is whole on this rank.

    kept: False on a rank that writes no file, which only takes part in fetching sharded parameters.
    """
    models: list[dict[str, SharedTensor]] = [{} for _ in renamed]
    rank = engine.grid.rank
    infos = (info for of_chunk in engine.infos for info in of_chunk)
    for info, (chunk, name, tensor) in zip(infos, engine.parameters(), strict=True):
        if not kept:
            continue
        tensor = engine.lasting(tensor)
        named = renamed[chunk]
        names = [named[each].name for each in (name, *info.second_names)]
        for each in (*names, *named[name].unused):
            models[chunk][each] = _whole(f"{chunk} {each}", tensor, rank)
    return models


def _whole(key: str, tensor: Tensor, rank: int) -> SharedTensor:
    """Return a tensor that this rank holds and writes."""
    placeholder = Placeholder(key, tuple(tensor.shape), dtype_name(tensor.dtype))
    part = Part(rank, 0, tensor.numel(), tensor.detach().view(-1))
    return SharedTensor(placeholder, parts=(part,), writers=(rank,))


def _slots(engine: Engine, renamed: list[dict[str, Listed]]) -> dict[Name, dict[str, SharedTensor]]:
    """Return the optimizer state of all parameters.

    The order is the same on all ranks that share the optimizer of any of these parameters, also on a rank that owns no
    range. If the optimizer is not shared, only writing ranks return entries.
    """
    optimizer = engine.optimizer
    assert optimizer is not None
    grid = engine.grid
    mixture = engine.config.experts.count > 0
    if not optimizer.distributed and not _writes(grid, grid.rank, mixture=mixture):
        return {}
    own = {(owned.chunk, owned.name): owned for owned in optimizer.ranges()}
    found: dict[Name, dict[str, SharedTensor]] = {}
    for info, shares in optimizer.shares():
        ranks = _sharing(grid, info) if optimizer.distributed else [grid.rank]
        writers = tuple(rank for rank in ranks if _writes(grid, rank, mixture=mixture))
        owned = own.get((info.chunk, info.name))
        listed = renamed[info.chunk][info.name]
        for slot in _slots_of(engine, info):
            parts = tuple(_part(share, ranks, grid.rank, slot, owned) for share in shares)
            _add(found, info, listed, slot, parts, writers)
    for owned in engine.resting_ranges():
        if not _writes(grid, grid.rank, mixture=mixture):
            continue
        # Each rank that writes a file holds these parameters as a whole.
        whole = Share(0, owned.start, owned.end)
        listed = renamed[owned.chunk][owned.name]
        for slot in _slots_of(engine, owned.info):
            part = _part(whole, [grid.rank], grid.rank, slot, owned)
            _add(found, owned.info, listed, slot, (part,), (grid.rank,))
    return found


def _slots_of(engine: Engine, info: ParameterInfo) -> list[str]:
    """Return the names of a parameter's optimizer state in a file."""
    optimizer = engine.optimizer
    assert optimizer is not None
    slots = list(optimizer.algorithm.of(info).state)
    if engine.dtype_of(info) != torch.float32:  # an fp32 weight is its own master
        slots.insert(0, MASTER)
    return slots


def _add(
    found: dict[Name, dict[str, SharedTensor]],
    info: ParameterInfo,
    listed: Listed,
    slot: str,
    parts: tuple[Part, ...],
    writers: tuple[int, ...],
) -> None:
    """Add a tensor of optimizer state under all names of its parameter."""
    for name in (listed.name, *listed.unused):
        key = f"{info.chunk} {slot} {name}"
        placeholder = Placeholder(key, info.native.shape, "float32")
        of_parameter = found.setdefault((info.chunk, name), {})
        of_parameter[slot] = SharedTensor(placeholder, parts, writers)


def _sharing(grid: Grid, info: ParameterInfo) -> list[int]:
    """Return the ranks that share the optimizer state of a parameter."""
    group = grid.group(info.reduced_over)
    return [grid.rank] if group is None else dist.get_process_group_ranks(group)


def _part(share: Share, ranks: list[int], rank: int, slot: str, owned: FlatRange | None) -> Part:
    """Return one rank's range of a state tensor. ranks: the ranks that share the optimizer. rank: this rank.

    owned: this rank's range of the parameter, or None.
    """
    holder = ranks[share.rank]
    values = owned.in_float32(slot) if holder == rank and owned else None
    return Part(holder, share.start, share.end, values)
