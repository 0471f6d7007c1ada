"""What a rank puts into a checkpoint, as views, or copies of a moment; and how it finds its blocks of `torch_dist`.

Optimizer state is saved as Megatron's fully_reshardable form: sharded like the weights, whatever ranges the ranks own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaconv.megatron.distributed.keys import stacks_layers
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.table import encoder_layers
from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.files import empty_object
from megatron_lite.checkpoint.placement import Place, Shard, flat_shards, places, shards
from megatron_lite.checkpoint.rank_file import RankFile
from megatron_lite.engine import Engine
from megatron_lite.parallel.parameters import ParameterInfo

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
    rank_file: RankFile | None = None
    """Of `torch`."""
    files: Mapping[str, bytes] | None = None
    """Of a run that trains adapters, by name; on rank 0."""

    def copied(self, copies: Copies) -> "Snapshot":
        """With tensors that training won't change, in main memory; they are there after copies.wait()."""
        copies.begin()
        moved = tuple(replace(shard, tensor=copies.of(shard.tensor)) for shard in self.shards)
        file = None if self.rank_file is None else self.rank_file.copied(copies.of)
        copies.end()
        return replace(self, shards=moved, rank_file=file)


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
