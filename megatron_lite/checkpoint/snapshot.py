"""What a rank puts into a checkpoint: blocks of `torch_dist`, or a whole rank file of `torch`; views, or copies of a moment.

Optimizer state is saved as Megatron's fully_reshardable form: sharded like the weights, whatever ranges the ranks own.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from formats import rank_files
from megaconv.families import family
from megaconv.megatron.arguments.param_groups import is_expert
from megaconv.megatron.distributed.keys import stacks_layers
from megaconv.megatron.states.names import core_order, extra_states
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE, core_naming
from megaconv.model.natives import native_tensors
from megaconv.model.table import encoder_layers
from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.files import empty_object
from megatron_lite.checkpoint.placement import Place, Shard, flat_shards, places, shards
from megatron_lite.engine import Engine
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.parallel.zero import STATE, FlatRange, kind_of

NAMING = CORE
"""Of the engine's parameters."""

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
}  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """One rank's part."""

    iteration: int
    common: Mapping[str, Any]
    shards: tuple[Shard, ...] = ()
    objects: Mapping[str, bytes] | None = None
    rank_file: tuple[str, Mapping[str, Any]] | None = None
    """Its path below the iteration, and its contents; None where another rank writes it, and for torch_dist."""
    files: Mapping[str, bytes] | None = None
    """Of a run that trains adapters, by name; on rank 0."""

    def copied(self, copies: Copies) -> "Snapshot":
        """With tensors that training won't change, in main memory; they are there after copies.wait()."""
        copies.begin()
        moved = tuple(replace(shard, tensor=copies.of(shard.tensor)) for shard in self.shards)
        file = None if self.rank_file is None else (self.rank_file[0], _copy(self.rank_file[1], copies))
        copies.end()
        return replace(self, shards=moved, rank_file=file)


def _copy(value: Any, copies: Copies) -> Any:
    """Tensors in dictionaries and lists."""
    if isinstance(value, Tensor):
        return copies.of(value)
    if isinstance(value, dict):
        return type(value)((key, _copy(item, copies)) for key, item in value.items())
    return type(value)(_copy(item, copies) for item in value) if isinstance(value, list) else value


def chunk_places(engine: Engine, *, local: bool) -> list[dict[str, Place]]:
    """Of this rank's chunks."""
    config, grid = engine.config, engine.grid
    vocab_rows = padded_vocab(config.vocab, engine.options.vocab_divisor, grid.layout.tp)
    at = grid.experts_place() if config.experts.count else (0, 0)
    return [
        places(config, grid.layout, grid.tp_rank, chunk, vocab_rows, NAMING, *at, local=local)
        for chunk in grid.chunks()
    ]


def dist_snapshot(engine: Engine, common: Mapping[str, Any], *, with_optimizer: bool, impl: str) -> Snapshot:
    """Of `torch_dist`. impl: whose modules are listed, transformer_engine or local."""
    engine.finish()
    found = tuple(_dist_shards(engine, chunk_places(engine, local=impl == "local"), with_optimizer))
    objects = {} if engine.grid.tp_rank or engine.grid.rank_along("replicas") else dict(_extra_states(engine, impl))
    common = {**common, **_dist_form(engine, common["optimizer"])} if with_optimizer else common
    if not stacks_layers(engine.config):
        common = {**common, "content_metadata": {**common.get("content_metadata", {}), "non_homogeneous_layers": True}}
    return Snapshot(common["iteration"], common, found, objects)


def _dist_form(engine: Engine, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What common.pt says of the optimizer: Megatron's distributed one is Adam's alone, SGD has the form of its others."""
    if _is_adam(engine):
        sharding = {"param_state_sharding_type": SHARDING["distrib_optim_sharding_type"]}
        return {"optimizer": {**optimizer, **sharding}, "content_metadata": dict(SHARDING)}
    inner = {"state": {}, **optimizer["optimizer"]}
    content = {name: value for name, value in SHARDING.items() if not name.startswith("distrib")}
    in_fp32 = engine.dtype == torch.float32
    return {"optimizer": inner if in_fp32 else {**optimizer, "optimizer": inner}, "content_metadata": content}


def _dist_shards(engine: Engine, placed: list[dict[str, Place]], with_optimizer: bool) -> Iterator[Shard]:
    """What several ranks hold that see other sequences, they share out."""
    grid = engine.grid
    infos = (info for chunk in engine.infos for info in chunk)
    for number, (info, (chunk, name, tensor)) in enumerate(zip(infos, engine.parameters(), strict=True)):
        if _is_turn(engine, info, number) and _is_ours(info, grid.tp_rank):
            for each in (name, *info.second_names):
                yield from shards(placed[chunk][each], tensor.detach())
    if not with_optimizer or engine.optimizer is None:
        return
    for number, owned in enumerate(engine.optimizer.ranges()):
        # Of several names Megatron's optimizer takes the last: those of its modules are in the order in which they were made.
        place = placed[owned.chunk][(owned.name, *owned.info.second_names)[-1]]
        if _is_ours(owned.info, grid.tp_rank) and (
            engine.optimizer.distributed or _is_turn(engine, owned.info, number)
        ):
            for slot, flat in _stored(engine, owned.tensors):
                key = f"optimizer.state.{slot}.{place.key}"
                yield from flat_shards(place, key, flat.detach(), owned.start, owned.end)


def _is_adam(engine: Engine) -> bool:
    """Alone: muon's state has the form of SGD's, whose names it shares."""
    return engine.optimizer is not None and engine.optimizer.options.kind == "adamw"


def _stored(engine: Engine, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names of torch_dist."""
    for slot, flat in tensors.items():
        if slot != "master":
            yield slot, flat
        elif _is_adam(engine):
            yield "param", flat
        elif engine.dtype != torch.float32:
            yield "fp32_param", flat


def _is_turn(engine: Engine, info: ParameterInfo, number: int) -> bool:
    """Whether this rank is the one to save a tensor, of all that hold it."""
    return engine.grid.is_turn(info.reduced_over, number)


def _is_ours(info: ParameterInfo, tp_rank: int) -> bool:
    return not info.is_copy and (not info.replicated or tp_rank == 0)


def _extra_states(engine: Engine, impl: str) -> Iterator[tuple[str, bytes]]:
    """Megatron demands them of every module that it has: of linear layers, and with Transformer Engine of attention."""
    config, content = engine.config, empty_object()
    stacked, count = stacks_layers(config), config.layer_count
    bert = config.has("transform !encoder")
    stack = "encoder" if bert else "decoder"
    for chunk in engine.grid.chunks():
        if bert and chunk.is_last:  # of a decoder's head Megatron leaves it out
            yield "output_layer._extra_state/shard_0_1", content
        for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers):
            at = (f"{stack}.layers.", layer, count) if stacked else (f"{stack}.layers.{layer}.", 0, 1)
            for key in _states_of_layer(config, layer, impl, *at):
                yield key, content
        if config.encoder.layers:
            for key in _states_of_encoder(config, chunk, impl):
                yield key, content
        for depth in range(config.mtp_layers if chunk.is_last else 0):
            prefix = f"mtp.layers.{depth}."
            yield f"{prefix}eh_proj._extra_state/shard_0_1", content
            for key in _states_of_layer(config, count - 1, impl, f"{prefix}transformer_layer.", 0, 1):
                yield key, content


def _states_of_encoder(config: ModelConfig, chunk: Chunk, impl: str) -> Iterator[str]:
    """And of the head, which has them under both of its names."""
    for layer in encoder_layers(config, chunk):
        for module in _of_attention("self_attention", ("linear_qkv",), impl) + _MLP:
            yield f"encoder.layers.{module}._extra_state/shard_{layer}_{config.encoder.layers}"
    for head in ("lm_head.output_layer", "output_layer") if chunk.is_last else ():
        yield f"{head}._extra_state/shard_0_1"


def _states_of_layer(
    config: ModelConfig, layer: int, impl: str, prefix: str, number: int, stacked: int
) -> Iterator[str]:
    """number: of the layer among those that are stacked under this prefix."""
    for module in _modules_with_states(config, layer, impl):
        yield f"{prefix}{module}._extra_state/shard_{number}_{stacked}"
    at, of = (f"{number}.", f"{stacked}.") if stacked > 1 else ("", "")
    for expert in range(config.experts.count if config.has("moe", layer) else 0):
        for module in ("linear_fc1", "linear_fc2"):
            key = f"{prefix}mlp.experts.experts.{module}._extra_state"
            yield f"{key}/shard_{at}{expert}_{of}{config.experts.count}"


def _modules_with_states(config: ModelConfig, layer: int, impl: str) -> list[str]:
    found = _of_attention("self_attention", _projections(config), impl)
    if config.encoder.layers:
        found += _of_attention("cross_attention", ("linear_q", "linear_kv"), impl)
    if config.has("dense", layer):
        return found + _MLP
    if config.experts.shared_ffn:
        return [*found, "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    return found


_MLP = ["mlp.linear_fc1", "mlp.linear_fc2"]


def _of_attention(name: str, projections: Sequence[str], impl: str) -> list[str]:
    core = ("core_attention",) if impl == "transformer_engine" else ()
    return [f"{name}.{module}" for module in ("linear_proj", *projections, *core)]


def _projections(config: ModelConfig) -> tuple[str, ...]:
    if not config.latent.kv_rank:
        return ("linear_qkv",)
    of_queries = ("linear_q_down_proj", "linear_q_up_proj") if config.latent.q_rank else ("linear_q_proj",)
    return (*of_queries, "linear_kv_down_proj", "linear_kv_up_proj")


def rank_snapshot(engine: Engine, common: Mapping[str, Any], *, with_optimizer: bool, impl: str) -> Snapshot:
    """Of `torch`. Collective over data-parallel ranks that share the optimizer's state.

    Megatron's ranks write that are the first of those that hold the same experts.
    """
    engine.finish()
    grid = engine.grid
    renamed = [_renamed(engine, chunk, impl) for chunk in grid.chunks()]
    models: list[dict[str, Tensor]] = [{} for _ in renamed]
    second_names = {(info.chunk, info.name): info.second_names for infos in engine.infos for info in infos}
    for chunk, name, tensor in engine.parameters():
        for each in (name, *second_names[chunk, name]):
            models[chunk][renamed[chunk][each]] = tensor.detach()
    order = core_order(family(engine.config.family).rows, core_naming(impl))
    ordered = [OrderedDict(sorted(model.items(), key=lambda entry: order(entry[0]))) for model in models]
    state = dict(common)
    mixture = engine.config.experts.count > 0
    writes = not grid.rank_along("edp" if mixture else "replicas")
    whole = _whole_slots(engine, keep=writes) if with_optimizer and engine.optimizer is not None else {}
    if not writes:
        return Snapshot(common["iteration"], common)
    if whole:
        slots = {(chunk, renamed[chunk][name]): values for (chunk, name), values in whole.items()}
        listed = [(chunk, name) for chunk, model in enumerate(ordered) for name in model if (chunk, name) in slots]
        state["optimizer"] = _optimizers(common["optimizer"], listed, ordered, slots, apart=grid.layout.ep > 1)
    for chunk, model in enumerate(ordered):
        entries: dict[str, Any] = {**model, **dict.fromkeys(extra_states(model), None)}
        key = "model" if len(ordered) == 1 else f"model{chunk}"
        state[key] = OrderedDict(sorted(entries.items(), key=lambda entry: order(entry[0])))
    ep_rank = grid.rank_along("ep") if mixture else 0
    directory = rank_files.rank_directory(grid.tp_rank, grid.pp_rank, ep_rank, grid.layout.pp, grid.layout.ep)
    return Snapshot(common["iteration"], common, rank_file=(f"{directory}/{rank_files.MODEL_FILE}", state))


def _renamed(engine: Engine, chunk: Chunk, impl: str) -> dict[str, str]:
    """From the engine's names to those of the implementation."""
    config, grid = engine.config, engine.grid
    vocab_rows = padded_vocab(config.vocab, engine.options.vocab_divisor, grid.layout.tp)
    at = grid.experts_place() if config.experts.count else (0, 0)
    ours, theirs = (
        native_tensors(family(config.family).rows, config, naming, grid.layout, grid.tp_rank, chunk, vocab_rows, *at)
        for naming in (NAMING, core_naming(impl))
    )
    return {our.name: their.name for our, their in zip(ours, theirs, strict=True)}


def _whole_slots(engine: Engine, *, keep: bool) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Optimizer state in the shape of this rank's parameters; views where it has all of it.

    What data-parallel ranks share is put together tensor by tensor, and kept in main memory by the rank that writes it (keep):
    the others never hold more than one. Collective then.
    """
    assert engine.optimizer is not None
    distributed, kind = engine.optimizer.distributed, engine.optimizer.options.kind
    own = {(owned.chunk, owned.name): owned for owned in engine.optimizer.ranges()}
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for info in (info for of_chunk in engine.infos for info in of_chunk if info.trained):
        owned = own.get((info.chunk, info.name))
        slots: dict[str, Tensor] = {}
        for slot in _slot_names(info, kind):
            if distributed:
                slots |= _put_together(engine, info, slot, owned, keep=keep)
            else:
                assert owned is not None
                slots[slot] = owned.tensors[slot].detach().view(info.native.shape)
        found[info.chunk, info.name] = slots
    return found


def _put_together(
    engine: Engine, info: ParameterInfo, slot: str, owned: FlatRange | None, *, keep: bool
) -> dict[str, Tensor]:
    whole = torch.zeros(math.prod(info.native.shape), dtype=torch.float32, device=engine.grid.device)
    if owned is not None:
        whole[owned.start : owned.end] = owned.tensors[slot].detach()
    # Of each element one rank has the bits and the others zeros: as integers they add up to the same bits.
    comm.all_reduce(whole.view(torch.int32), engine.grid.group(info.reduced_over))
    return {slot: whole.cpu().view(info.native.shape)} if keep else {}


def _slot_names(info: ParameterInfo, kind: str) -> tuple[str, ...]:
    """The same on every rank, also on one that owns nothing."""
    return ("master", *STATE[kind_of(info, kind)])


def _optimizers(
    groups: Mapping[str, Any],
    listed: list[tuple[int, str]],
    models: list[OrderedDict[str, Tensor]],
    slots: Mapping[tuple[int, str], Mapping[str, Tensor]],
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
    listed: list[tuple[int, str]],
    models: list[OrderedDict[str, Tensor]],
    slots: Mapping[tuple[int, str], Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Megatron's Float16OptimizerWithFloat16Params, or its FP32Optimizer, whose masters are the weights themselves.

    groups: common_state's optimizer. listed: parameters in the order of the model.
    """
    by_group: list[list[tuple[int, str]]] = [[], []]
    for chunk, name in listed:
        by_group[name.endswith(".bias") or models[chunk][name].dim() == 1].append((chunk, name))
    used = [pair for pair in zip(groups["optimizer"]["param_groups"], by_group, strict=True) if pair[1]]
    by_group = [keys for _, keys in used]
    numbers = {key: number for number, key in enumerate(key for group in by_group for key in group)}
    param_groups = [{**group, "params": [numbers[key] for key in keys]} for group, keys in used]
    counter = {"step": torch.tensor(float(param_groups[0]["step"]))}
    state = {
        numbers[key]: {slot: tensor for slot, tensor in slots[key].items() if slot != "master"}
        | (counter if "exp_avg" in slots[key] else {})
        for keys in by_group
        for key in keys
    }
    inner = {"state": state, "param_groups": param_groups}
    if all(models[chunk][name].dtype == torch.float32 for chunk, name in listed):
        return inner
    masters = [[slots[key]["master"] for key in keys] for keys in by_group]
    return {**groups, "optimizer": inner, "fp32_from_fp16_params": masters}
