"""The tensors that one rank contributes to a checkpoint, as views or as copies, and their blocks in `torch_dist`.

Optimizer state has Megatron's fully_reshardable form: it is sharded like the weights, whatever ranges the ranks own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaconv.families.biencoder import TOWERS
from megaconv.megatron.distributed.global_model import extra_objects_of_norms
from megaconv.megatron.distributed.keys import stacks_layers
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.predicting import kind_of_layer, predicting_kinds
from megaconv.model.table import encoder_layers
from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.files import empty_object
from megatron_lite.checkpoint.placement import Place, Shard, flat_shards, places, shards
from megatron_lite.checkpoint.rank_file import RankFile
from megatron_lite.checkpoint.tensor_file import TensorFile
from megatron_lite.engine import Engine
from megatron_lite.models.mixers.declaration import Mixer
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.optimizer.zero import Optimizer
from megatron_lite.parallel.parameters import ParameterInfo

NAMING = CORE
"""The naming scheme of the engine's parameters."""

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
}  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint."""

    iteration: int
    common: Mapping[str, Any]
    shards: tuple[Shard, ...] = ()
    objects: Mapping[str, bytes] | None = None
    rank_file: RankFile | None = None
    """This rank's file; only in a `torch` checkpoint."""
    files: Mapping[str, bytes | TensorFile] | None = None
    """File contents by name; only in a checkpoint of adapters, on rank 0."""

    @property
    def size(self) -> int:
        """Bytes that this rank writes. Small values next to the tensors are not counted."""
        blocks = sum(shard.tensor.nbytes for shard in self.shards)
        file = 0 if self.rank_file is None else self.rank_file.size
        return blocks + file + sum(map(len, (self.files or {}).values()))

    def copied(self, copies: Copies) -> "Snapshot":
        """Return a snapshot whose tensors are copies in main memory, which training does not change.

        The copies are complete after copies.wait().
        """
        copies.begin()
        moved = tuple(replace(shard, tensor=copies.of(shard.tensor)) for shard in self.shards)
        file = None if self.rank_file is None else self.rank_file.copied(copies.of)
        copies.end()
        return replace(self, shards=moved, rank_file=file)


def chunk_places(engine: Engine, *, local: bool) -> list[dict[str, Place]]:
    """Return the places of the tensors in each chunk of this rank."""
    config, grid = engine.config, engine.grid
    vocab_rows = padded_vocab(config.vocab, engine.options.vocab_divisor, grid.layout.tp)
    at = grid.experts_place() if config.experts.count else (0, 0)
    return [
        places(config, grid.layout, grid.tp_rank, chunk, vocab_rows, NAMING, *at, local=local)
        for chunk in grid.chunks()
    ]


def dist_snapshot(
    engine: Engine, common: Mapping[str, Any], *, with_optimizer: bool, impl: str
) -> Snapshot:
    """Return this rank's part of a `torch_dist` checkpoint. impl: the module names, `transformer_engine` or `local`."""
    engine.finish()
    found = tuple(_dist_shards(engine, chunk_places(engine, local=impl == "local"), with_optimizer))
    objects = (
        {}
        if engine.grid.tp_rank or engine.grid.rank_along("replicas")
        else dict(_extra_states(engine, impl))
    )
    common = {**common, **_dist_form(engine, common["optimizer"])} if with_optimizer else common
    if not stacks_layers(engine.config):
        common = {
            **common,
            "content_metadata": {
                **common.get("content_metadata", {}),
                "non_homogeneous_layers": True,
            },
        }
    return Snapshot(common["iteration"], common, found, objects)


def _dist_form(engine: Engine, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's entries of common.pt.

    Megatron's distributed optimizer is only for Adam. SGD and muon have the form of Megatron's other optimizers.
    """
    if _has_distributed_form(engine):
        sharding = {"param_state_sharding_type": SHARDING["distrib_optim_sharding_type"]}
        return {
            "optimizer": {**optimizer, **sharding},
            "content_metadata": dict(SHARDING),
        }
    form = {"state": {}, **optimizer["optimizer"]}
    if engine.dtype != torch.float32:
        form = {**optimizer, "optimizer": form}
    content = {name: value for name, value in SHARDING.items() if not name.startswith("distrib")}
    return {"optimizer": form, "content_metadata": content}


def _dist_shards(
    engine: Engine, placed: list[dict[str, Place]], with_optimizer: bool
) -> Iterator[Shard]:
    """Yield this rank's blocks. Data- and context-parallel ranks with the same tensors divide the tensors among them."""
    tp_rank = engine.grid.tp_rank
    infos = (info for chunk in engine.infos for info in chunk)
    parameters = zip(infos, engine.parameters(), strict=True)
    for number, (info, (chunk, name, tensor)) in enumerate(parameters):
        if _is_turn(engine, info, number) and _is_ours(info, tp_rank):
            kept = engine.lasting(tensor)
            for each in (name, *info.second_names):
                yield from shards(placed[chunk][each], kept)
    optimizer = engine.optimizer
    if not with_optimizer or optimizer is None:
        return
    for owned, is_turn in _with_turns(engine, optimizer):
        info = owned.info
        if not is_turn or not _is_ours(info, tp_rank):
            continue
        # If a parameter has several names, Megatron's optimizer uses the last, in the order in which modules are created.
        names = owned.name, *info.second_names
        place = placed[owned.chunk][names[-1]]
        for slot, flat in _stored(engine, owned):
            key = f"optimizer.state.{slot}.{place.key}"
            yield from flat_shards(place, key, flat.detach(), owned.start, owned.end)


def _with_turns(engine: Engine, optimizer: Optimizer) -> Iterator[tuple[FlatRange, bool]]:
    """Yield the ranges of all parameters, and whether this rank saves them, out of all ranks that hold them."""
    for number, owned in enumerate(optimizer.ranges()):
        yield owned, optimizer.distributed or _is_turn(engine, owned.info, number)
    for number, owned in enumerate(engine.resting_ranges()):
        yield owned, _is_turn(engine, owned.info, number)


def _has_distributed_form(engine: Engine) -> bool:
    """Return whether the optimizer has the form of Megatron's distributed optimizer."""
    return engine.optimizer is not None and engine.optimizer.algorithm.distributed_form


def _stored(engine: Engine, owned: FlatRange) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's tensors under their names in `torch_dist`."""
    for slot in owned.tensors:
        flat = owned.in_float32(slot)
        if slot != "master":
            yield slot, flat
        elif _has_distributed_form(engine):
            yield "param", flat
        elif engine.dtype_of(owned.info) != torch.float32:
            yield "fp32_param", flat


def _is_turn(engine: Engine, info: ParameterInfo, number: int) -> bool:
    """Return whether this rank saves the tensor, out of all ranks that hold it."""
    return engine.grid.is_turn(info.reduced_over, number)


def _is_ours(info: ParameterInfo, tp_rank: int) -> bool:
    return not info.is_copy and (not info.replicated or tp_rank == 0)


def _extra_states(engine: Engine, impl: str) -> Iterator[tuple[str, bytes]]:
    """Yield the extra states that Megatron requires: of all linear layers, and with Transformer Engine of attention and norms."""
    content = empty_object()
    for chunk in engine.grid.chunks():
        for key in _extra_keys(engine.config, chunk, impl):
            yield key, content


def _extra_keys(config: ModelConfig, chunk: Chunk, impl: str) -> Iterator[str]:
    """Yield the keys of the extra states of a chunk."""
    count = config.layer_count
    stacked = stacks_layers(config)
    if impl == "transformer_engine" and chunk.is_first:
        yield from _states_of_norms(config)
    bert = config.has("transform !encoder")
    stacks = _stacks(config, bert=bert)
    # Megatron omits it for the head of other decoders.
    if chunk.is_last and (bert or config.has("hybrid_stack")):
        yield "output_layer._extra_state/shard_0_1"
    for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers):
        for stack in stacks:
            if stacked:
                yield from _states_of_layer(config, layer, impl, f"{stack}.layers.", layer, count)
            else:
                yield from _states_of_layer(config, layer, impl, f"{stack}.layers.{layer}.", 0, 1)
    if config.encoder.layers:
        yield from _states_of_encoder(config, chunk, impl)
    for depth in range(config.mtp_layers if chunk.is_last else 0):
        yield f"mtp.layers.{depth}.eh_proj._extra_state/shard_0_1"
        yield from _states_of_prediction(config, depth, impl)


def _states_of_prediction(config: ModelConfig, depth: int, impl: str) -> Iterator[str]:
    """Yield the keys of the layers inside a layer that predicts further tokens."""
    inside, prefix = len(predicting_kinds(config)), f"mtp.layers.{depth}."
    first = config.layer_count + depth * inside
    if inside == 1:
        yield from _states_of_layer(config, first, impl, f"{prefix}transformer_layer.", 0, 1)
        return
    for part in range(inside):
        within = f"{prefix}mtp_model_layer.layers.{part}."
        yield from _states_of_layer(config, first + part, impl, within, 0, 1)


def _states_of_norms(config: ModelConfig) -> Iterator[str]:
    """Yield the keys for all stages. Norms inside Transformer Engine's linear layers have none."""
    for state in extra_objects_of_norms(config):
        place, grid = (".".join(map(str, sizes)) for sizes in (state.place, state.grid))
        yield f"{state.key}/shard_{place}_{grid}"


def _stacks(config: ModelConfig, *, bert: bool) -> list[str]:
    """Return the names of the stacks of layers; a T5's encoder is not among them."""
    if config.has("retriever"):
        towers = [tower for tower, feature in TOWERS.items() if config.has(feature)]
        return [f"{tower}_model.encoder" for tower in towers]
    return ["encoder" if bert else "decoder"]


def _states_of_encoder(config: ModelConfig, chunk: Chunk, impl: str) -> Iterator[str]:
    """Yield the keys of a T5 encoder and of the head. The head has its key under both of its names."""
    for layer in encoder_layers(config, chunk):
        for module in _of_attention("self_attention", ("linear_qkv",), impl) + _MLP:
            yield f"encoder.layers.{module}._extra_state/shard_{layer}_{config.encoder.layers}"
    for head in ("lm_head.output_layer", "output_layer") if chunk.is_last else ():
        yield f"{head}._extra_state/shard_0_1"


def _states_of_layer(
    config: ModelConfig, layer: int, impl: str, prefix: str, number: int, stacked: int
) -> Iterator[str]:
    """Yield the keys of one layer's extra states. number: the layer's index among the layers stacked under this prefix."""
    for module in _modules_with_states(config, layer, impl):
        yield f"{prefix}{module}._extra_state/shard_{number}_{stacked}"
    at, of = (f"{number}.", f"{stacked}.") if stacked > 1 else ("", "")
    for expert in range(config.experts.count if config.has("moe", layer) else 0):
        for module in ("linear_fc1", "linear_fc2"):
            key = f"{prefix}mlp.experts.experts.{module}._extra_state"
            yield f"{key}/shard_{at}{expert}_{of}{config.experts.count}"


def _modules_with_states(config: ModelConfig, layer: int, impl: str) -> list[str]:
    mixer = mixer_of(config, kind_of_layer(config, layer))
    found = [] if mixer is None else _of_mixer(mixer, config, impl)
    if config.encoder.layers:
        found += _of_attention("cross_attention", ("linear_q", "linear_kv"), impl)
    if config.has("retrieves", layer):
        found += _of_retrieval(config, layer, impl)
    if config.has("dense", layer):
        return found + _MLP
    if config.has("moe expert_latent", layer) and impl == "transformer_engine":
        found += ["mlp.fc1_latent_proj", "mlp.fc2_latent_proj"]
    if config.has("moe shared_ffn", layer):
        found += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    return found


def _of_retrieval(config: ModelConfig, layer: int, impl: str) -> list[str]:
    """Return the modules of cross attention, and of the encoder in the first layer that has it."""
    cross = _of_attention("cross_attention.attn", ("linear_q", "linear_kv"), impl)
    encoder = config.retrieval.layers if layer == config.retrieving[0] else 0
    found = list(cross)
    for number in range(encoder):
        prefix = f"cross_attention.encoder.layers.{number}."
        inner = _of_attention("self_attention", ("linear_qkv",), impl)
        inner += cross if number == 0 else []
        found += [prefix + module for module in (*inner, *_MLP)]
    return found


def _of_mixer(mixer: Mixer, config: ModelConfig, impl: str) -> list[str]:
    core = ("core_attention",) if mixer.attends and impl == "transformer_engine" else ()
    return [f"{mixer.place}.{module}" for module in (*mixer.matrices(config), *core)]


_MLP = ["mlp.linear_fc1", "mlp.linear_fc2"]


def _of_attention(name: str, projections: Sequence[str], impl: str) -> list[str]:
    core = ("core_attention",) if impl == "transformer_engine" else ()
    return [f"{name}.{module}" for module in ("linear_proj", *projections, *core)]
