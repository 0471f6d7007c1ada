"""Refuses values that no model has: sizes that are no numbers, or that contradict each other."""

from math import inf, isfinite
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.model.described import DescribedModel, value_of
from megaconv.model.sizes import SIZES

_NUMBERS = ("norm.epsilon", "positions.theta", "positions.rotary_percent")


def require_sound(model: DescribedModel) -> None:
    """Raises CorruptCheckpoint for values that no model has."""
    _check_numbers(model)
    _check_windows(model)
    _check_experts(model)
    _check_latent(model)
    _check_indexer(model)
    _check_sources(model)
    _check_compressed(model)
    _check_convolved(model)
    _check_relative(model)
    _check_loops(model)
    _check_head(model)
    _check_linear(model)
    _check_mamba(model)
    _check_mamba1(model)
    _check_recurrent(model)
    _check_convolution(model)
    _check_blocks(model)
    _check_retrieval(model)


def _check_numbers(model: DescribedModel) -> None:
    for name, size in SIZES.items():
        value = size.of(model)
        if type(value) is not int or value < size.least:
            raise CorruptCheckpoint(
                f"the model's {name} should be a positive number, found {value!r:.60}"
            )
    if not model.layers:
        raise CorruptCheckpoint("the model's layers should be a positive number, found 0")
    for name in _NUMBERS:
        value = value_of(model, name)
        if type(value) not in (int, float) or not isfinite(value):
            raise CorruptCheckpoint(f"the model's {name} should be a number, found {value!r:.60}")
    scaling = value_of(model, "positions.scaling") or {}
    factor: Any = scaling.get("factor")
    if type(factor) in (int, float) and not 0 < factor < inf:
        raise CorruptCheckpoint(
            f"the factor of the model's rope scaling should be a positive number, found {factor!r:.60}"
        )
    if model.attention.scale == 0:
        raise CorruptCheckpoint(
            "the model's attention.scale is 0, with which each token attends to all others alike"
        )


def _check_windows(model: DescribedModel) -> None:
    for kind in model.layers:
        if kind.window is not None and (type(kind.window) is not int or kind.window < 1):
            raise CorruptCheckpoint(
                f"the model's attention window should be a positive number, found {kind.window!r:.60}"
            )


def _check_experts(model: DescribedModel) -> None:
    experts = model.experts
    if experts.count and not (
        experts.ffn and 0 < experts.per_token <= experts.count + experts.zero
    ):
        what = f"{experts.per_token} of {experts.count} experts of width {experts.ffn}"
        raise CorruptCheckpoint(f"the model can't have {what} for each token")


def _check_latent(model: DescribedModel) -> None:
    latent, width = model.latent, model.attention.head_dim
    rotates = latent.rope_dim > 0 or model.positions.kind == "none"
    if latent.kv_rank and not (rotates and latent.rope_dim < width and latent.v_dim):
        what = f"heads of {width}, {latent.rope_dim} of them rotating, and values of {latent.v_dim}"
        raise CorruptCheckpoint(f"the model's latent attention can't have {what}")


def _check_indexer(model: DescribedModel) -> None:
    indexer, latent = model.indexer, model.latent
    if not indexer.heads:
        return
    rotates = latent.rope_dim > 0 or model.positions.kind == "none"
    fits = rotates and indexer.head_dim >= latent.rope_dim
    has_queries = indexer.from_hidden or latent.q_rank
    if not (has_queries and fits and indexer.topk > 0):
        what = f"{indexer.heads} heads of {indexer.head_dim} that choose {indexer.topk} positions"
        raise CorruptCheckpoint(
            f"the model's indexer can't have {what} where {latent.rope_dim} elements rotate"
        )


def _check_sources(model: DescribedModel) -> None:
    """Refuses layers that take from a layer which isn't before them, or which has nothing of its own to give."""
    for layer, kind in enumerate(model.layers):
        source = kind.kv_source
        if source is None:
            continue
        if not 0 <= source < layer or model.layers[source].kv_source is not None:
            raise CorruptCheckpoint(
                f"the model's layer {layer} can't take latent keys and values of layer {source}"
            )
    if model.indexer.heads and model.layers[0].shares_index:
        raise CorruptCheckpoint(
            "the model's first layer can't share positions that an earlier indexer selected"
        )


def _check_compressed(model: DescribedModel) -> None:
    found, heads = model.compressed, model.attention.heads
    if not any(kind.mixer == "compressed" for kind in model.layers):
        return
    widths = (found.q_rank, found.out_groups, found.out_rank)
    if not all(widths) or heads % found.out_groups:
        what = f"{heads} heads in {found.out_groups} groups of {found.out_rank}, and queries of rank {found.q_rank}"
        raise CorruptCheckpoint(f"the model's compressed attention can't have {what}")
    needed = {
        "none": (),
        "all": (found.long,),
        "selected": (found.short, found.index_heads, found.index_dim, found.topk),
    }
    for entries in {kind.entries for kind in model.layers}:
        if not all(needed[entries]):
            what = f"{entries} entries with {found}"
            raise CorruptCheckpoint(f"the model's compressed attention can't have {what}")


def _check_convolved(model: DescribedModel) -> None:
    """Refuses convolutions without a width, and values of which the token before can't give one half."""
    found, attention = model.convolved, model.attention
    if not (found.channels or found.heads):
        return
    if not (found.channels and found.heads) or attention.kv_heads * attention.head_dim % 2:
        what = f"{attention.kv_heads} key/value heads of {attention.head_dim}"
        raise CorruptCheckpoint(
            f"the model's attention can't have {what} and convolutions over {found.channels} and {found.heads} positions"
        )


def _check_relative(model: DescribedModel) -> None:
    found = model.relative
    if found.width and not found.extent:
        raise CorruptCheckpoint(
            f"the model can't have {found.width} profiles of biases over {found.extent} distances"
        )


def _check_loops(model: DescribedModel) -> None:
    loops, layers = model.loops, len(model.layers)
    if loops.runs and loops.before + loops.after > layers:
        raise CorruptCheckpoint(
            f"the model can't have {loops.before} layers before those that run several times and {loops.after} after them: it has {layers}"
        )


def _check_head(model: DescribedModel) -> None:
    if model.predicted - model.head.left_out < 1:
        raise CorruptCheckpoint(
            f"the model can't have {model.vocab} tokens, {model.head.unpredicted + model.head.left_out} of them without a logit"
        )


def _check_linear(model: DescribedModel) -> None:
    linear = model.linear
    if not any(kind.mixer in ("linear", "kda") for kind in model.layers):
        return
    heads = linear.key_heads, linear.value_heads
    sizes = (*heads, linear.key_dim, linear.value_dim, linear.conv)
    if not all(sizes) or linear.value_heads % linear.key_heads:
        what = f"{linear.key_heads} key heads of {linear.key_dim}, {linear.value_heads} value heads of {linear.value_dim}"
        raise CorruptCheckpoint(
            f"the model's linear attention can't have {what} and a convolution over {linear.conv} positions"
        )


def _check_mamba(model: DescribedModel) -> None:
    mamba = model.mamba
    if not any(kind.mixer in ("mamba", "side_by_side") for kind in model.layers):
        return
    sizes = (mamba.heads, mamba.head_dim, mamba.groups, mamba.state)
    if not all(sizes) or mamba.heads % mamba.groups:
        what = f"{mamba.heads} heads of {mamba.head_dim} in {mamba.groups} groups, and a state of {mamba.state}"
        raise CorruptCheckpoint(f"the model's Mamba layers can't have {what}")


def _check_mamba1(model: DescribedModel) -> None:
    mamba = model.mamba1
    if not any(kind.mixer == "mamba1" for kind in model.layers):
        return
    if not all((mamba.width, mamba.state, mamba.conv, mamba.rank)):
        what = f"{mamba.width} channels, states of {mamba.state}, time steps from {mamba.rank} elements"
        raise CorruptCheckpoint(
            f"the model's Mamba 1 layers can't have {what} and a convolution over {mamba.conv} positions"
        )
    if mamba.heads and mamba.width % mamba.heads:
        raise CorruptCheckpoint(
            f"the model's Mamba 1 layers can't have {mamba.width} channels in {mamba.heads} heads"
        )


def _check_recurrent(model: DescribedModel) -> None:
    if not any(kind.mixer == "recurrent" for kind in model.layers):
        return
    head_dim, conv = model.recurrent.head_dim, model.recurrent.conv
    if not head_dim or not conv:
        raise CorruptCheckpoint(
            f"the model's recurrences can't have heads of {head_dim} channels and a convolution over {conv} positions"
        )


def _check_convolution(model: DescribedModel) -> None:
    if any(kind.mixer == "convolution" for kind in model.layers) and not model.convolution.width:
        raise CorruptCheckpoint(
            "the model's short convolutions should be over a positive number of positions, found 0"
        )


def _check_blocks(model: DescribedModel) -> None:
    blocks = model.blocks
    if not any(kind.block for kind in model.layers):
        return
    if not blocks.count or (blocks.attention_adapters and not blocks.adapter_rank):
        raise CorruptCheckpoint(
            f"the model's shared blocks can't be {blocks.count} with adapters of rank {blocks.adapter_rank}"
        )


def _check_retrieval(model: DescribedModel) -> None:
    found = model.retrieval
    if not found.layers:
        return
    if not model.retrieving:
        raise CorruptCheckpoint(
            f"the model can't attend to retrieved text with {model.layer_count} layers: layer 6 is the first that does"
        )
    if not (found.chunk and found.neighbors and found.chunks):
        what = f"{found.neighbors} neighbors of {found.chunks} chunks of {found.chunk} tokens"
        raise CorruptCheckpoint(f"the model can't attend to {what} (Retro)")
