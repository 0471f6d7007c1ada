"""The model that a Megatron checkpoint's tensors show: layers, sizes, features.

Tensors are right even if args are wrong.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from formats.wording import counted
from megaconv.errors import TensorMismatch, UnknownFamily
from megaconv.megatron.arguments.head_sizes import find_bert, find_scores
from megaconv.megatron.arguments.mixer_sizes import (
    attention_of,
    is_hybrid,
    mixers_of,
    sizes_of_mixers,
)
from megaconv.megatron.arguments.size_tensors import SizeTensors
from megaconv.megatron.arguments.write import LEFT_OUT
from megaconv.megatron.states.ranks import Ranks, Weights
from megaconv.model.described import OF_ONE_LAYER
from megaconv.model.fields import one_or_each
from megaconv.model.layout import Layout
from megaconv.model.retrieving import retrieving_layers

_SINKS = "self_attention.core_attention.softmax_offset"
"""Attention sinks, which some models have in layers with a window alone."""


def find_layout(ranks: Ranks, args: Namespace, names: SizeTensors) -> Layout:
    """Sizes of the rank grid, and layers of each stage.

    Raises TensorMismatch if the number of layers differs from args.
    """
    vpp = max(len(chunks) for chunks in ranks.weights.values())
    counts = _stage_layers(ranks, vpp, names.layers)
    encoder = _encoder_layers(ranks, vpp, names)
    layers = sum(counts)
    expected = getattr(args, "num_layers", None)
    if sum(encoder) and layers == getattr(args, "decoder_num_layers", None):
        # Legacy models; Megatron core uses num_layers for a decoder and ignores decoder_num_layers.
        expected = layers
    if expected is not None and layers != expected:
        raise TensorMismatch(
            f"the rank files hold {counted(layers, 'layer')} ({_by_stage(counts)}), "
            f"their args say {expected}; is a stage missing?"
        )
    if not sum(encoder) or ranks.pp == 1:
        return Layout(ranks.tp, ranks.pp, vpp, ranks.ep, stage_layers=counts)
    return Layout(
        ranks.tp,
        ranks.pp,
        vpp,
        ranks.ep,
        stage_layers=counts,
        encoder_stage_layers=_own_stages(encoder, counts, args),
    )


def _own_stages(
    encoder: tuple[int, ...], decoder: tuple[int, ...], args: Namespace
) -> tuple[int, ...]:
    """The encoder's layers on the stages before the decoder's. Raises TensorMismatch if stages hold layers of both."""
    split = sum(1 for _ in takewhile(lambda layers: layers == 0, decoder))
    own = encoder[:split]
    layers = sum(encoder)
    if sum(own) != layers or not all(decoder[split:]):
        raise TensorMismatch(
            f"the pipeline stages hold {_by_stage(encoder)} layers of an encoder "
            f"and {_by_stage(decoder)} of a decoder; "
            "expected all of the encoder's on stages before the decoder's"
        )
    expected = getattr(args, "encoder_num_layers", None)
    if expected is not None and layers != expected:
        raise TensorMismatch(
            f"the rank files hold {layers} layers of an encoder ({_by_stage(own)}), "
            f"their args say {expected}; is a stage missing?"
        )
    return own


def _by_stage(layers: tuple[int, ...]) -> str:
    return "+".join(map(str, layers))


def _stage_layers(ranks: Ranks, vpp: int, before_number: str) -> tuple[int, ...]:
    """The number of layers with this prefix on each stage, in the order of the model."""
    stages = [
        (vpp_rank, ranks.dense(0, pp_rank))
        for vpp_rank in range(vpp)
        for pp_rank in range(ranks.pp)
    ]
    return tuple(
        _layer_count(chunks[vpp_rank], before_number) if vpp_rank < len(chunks) else 0
        for vpp_rank, chunks in stages
    )


def _encoder_layers(ranks: Ranks, vpp: int, names: SizeTensors) -> tuple[int, ...]:
    """The number of the encoder's layers on each stage; empty if the encoder is the last stack."""
    return (
        ()
        if names.layers.startswith(names.encoder)
        else _stage_layers(ranks, vpp, names.encoder + "layers.")
    )


def _layer_count(weights: Weights, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"(\d{1,9})\.")
    numbers = {int(found[1]) for name in weights if (found := pattern.match(name))}
    if numbers and max(numbers) >= len(numbers):
        raise TensorMismatch(
            f"there are tensors of layer {max(numbers)}, but of only {len(numbers)} layers in all"
        )
    return len(numbers)


def _retriever_layers(first: Weights, names: SizeTensors, layers: int) -> int:
    """The number of layers of Retro's encoder, which is in the first layer that attends to retrieved text."""
    holding = next(iter(retrieving_layers(layers)), 0)
    return _layer_count(first, f"{names.layers}{holding}.cross_attention.encoder.layers.")


def padded_rows(ranks: Ranks, names: SizeTensors) -> int:
    """Rows of the embedding on all ranks together, with padding."""
    return ranks.tp * int(ranks.dense(0, 0)[0][names.embedding].shape[0])


def find_sizes(ranks: Ranks, layout: Layout, args: Namespace, names: SizeTensors) -> dict[str, Any]:
    """The fields of the configuration that tensors show; the vocabulary includes its padding.

    Raises UnknownFamily if the tensors aren't those of a supported model.
    """
    first, last = ranks.dense(0, 0)[0], ranks.dense(0, layout.pp - 1)[-1]
    layers = dict(_layers(ranks, layout, names.layers))
    encoder_layers = sum(_encoder_layers(ranks, layout.vpp, names))
    if names.embedding not in first or not layers:
        raise UnknownFamily(
            f"{ranks.files[min(ranks.files)]}: is not a supported model (it has no word embeddings, or no layers)"
        )
    _require_matrices(ranks, names)
    hidden = first[names.embedding].shape[-1]
    hybrid = is_hybrid(layers, last, args, names)
    mixers = mixers_of(layers, names, hybrid=hybrid)
    attention = attention_of(layers, mixers, names)
    found: dict[str, Any] = {
        "layers.count": sum(layout.stage_layers),
        "layers.mixer": one_or_each(mixers),
        "hidden": hidden,
        "vocab": padded_rows(ranks, names),
        "tie_embeddings": _is_tied(last, layout, args, names),
        **_find_attention(attention, names),
        # In some models only the last layer has it.
        "attention.o_bias": any(
            name.endswith(names.o + ".bias") for layer in layers.values() for name in layer
        ),
        "attention.sinks": any(_SINKS in layer for layer in layers.values()),
        **_find_norms(attention, hidden, layout.tp, args, names),
        "mtp_layers": _layer_count(last, "mtp.layers."),
    }
    found |= _find_mlp(layers, layout, args, names) | sizes_of_mixers(layers, layout, names)
    if found.get("norm.place") == "after" and "linear" in mixers:
        found["norm.place"] = "by_mixer"
    if any(_is_norm_bias(name) for name in layers[0]):
        found["norm.kind"] = "LayerNorm"
    if names.positions in first:
        found |= {"positions.kind": "learned", "max_positions": first[names.positions].shape[0]}
    mlps = _mlps(layers, names, hybrid=hybrid)
    if set(mlps) != {"dense"}:
        found["layers.mlp"] = one_or_each(mlps)
    found |= _find_experts(layers)
    has_final_norm = names.final_norm + ".weight" in last
    retriever_layers = _retriever_layers(first, names, len(layers))
    if retriever_layers:
        found |= {"retrieval.layers": retriever_layers, "norm.final": has_final_norm}
    if encoder_layers:
        found |= {"encoder.layers": encoder_layers, "norm.final": has_final_norm}
        return found | {"head.bias": names.head_bias in last} | _find_relative(first)
    return found | find_bert(first, last, names) | find_scores(first, last, names)


def _find_attention(attention: Weights, names: SizeTensors) -> dict[str, Any]:
    """The fields of attention that its tensors show. attention: a layer with attention; empty if there is none."""
    found = {
        "attention.qkv_bias": names.qkv + ".bias" in attention,
        "attention.o_bias": names.o + ".bias" in attention,
    }
    if attention:
        # Latent attention has only q's norm.
        found["attention.qk_norm"] = "self_attention.k_layernorm.weight" in attention
    return found


def _is_norm_bias(name: str) -> bool:
    """True for a bias of a norm of hidden states. The indexer of sparse attention has its own kind of norm."""
    return "norm" in name and name.endswith("bias") and ".indexer." not in name


def _mlps(layers: Mapping[int, Weights], names: SizeTensors, *, hybrid: bool) -> tuple[str, ...]:
    """The MLP of each layer. Only hybrids have layers without one."""

    def mlp(layer: Weights) -> str:
        if "mlp.router.weight" in layer:
            return "experts"
        return "none" if hybrid and names.fc2 + ".weight" not in layer else "dense"

    return tuple(mlp(layers[index]) for index in sorted(layers))


def _find_norms(
    layer: Weights, hidden: int, tp: int, args: Namespace, names: SizeTensors
) -> dict[str, Any]:
    """The fields for norms that Megatron core has no modules for, and for the width of the norms of q and k."""
    found: dict[str, Any] = {}
    if names.o + ".post_layernorm.weight" in layer:
        before = names.qkv + ".layer_norm_weight" in layer or "input_layernorm.weight" in layer
        found["norm.place"] = "both" if before else "after"
    if "self_attention.k_layernorm.weight" not in layer:
        return found
    shape = layer["self_attention.q_layernorm.weight"].shape
    if len(shape) == 2:  # a row for each head
        return found | {"attention.qk_norm_width": "own"}
    heads = getattr(args, "num_attention_heads", None)
    if heads is None or heads <= tp:
        return found  # on a rank with one head, a norm over the head and a norm over all heads have the same width
    head_dim = getattr(args, "kv_channels", None) or hidden // heads
    width = shape[0]
    over_all = width == heads * head_dim // tp and width != head_dim
    return found | {"attention.qk_norm_width": "all" if over_all else "head"}


def require_gate(ranks: Ranks, layout: Layout, args: Namespace, names: SizeTensors) -> None:
    """Raises TensorMismatch if args have attention_output_gate, and q, k and v don't have the rows for the gate.

    Args that leave out the sizes of single layers don't give the rows.
    """
    left_out = getattr(args, LEFT_OUT, ())
    has_own_sizes = any(f"layers.{size}" in left_out for size in OF_ONE_LAYER)
    if getattr(args, "attention_output_gate", None) is not True or has_own_sizes:
        return
    heads, hidden = args.num_attention_heads, ranks.dense(0, 0)[0][names.embedding].shape[-1]
    kv_heads = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
    head_dim = getattr(args, "kv_channels", None) or hidden // heads
    expected = (2 * heads + 2 * kv_heads) * head_dim
    for index, layer in _layers(ranks, layout, names.layers):
        attention = (
            any(name.startswith("self_attention.") for name in layer)
            and names.linear + ".weight" not in layer
        )
        qkv = layer.get(names.qkv + ".weight")
        rows = layout.tp * qkv.shape[0] if qkv is not None else 0
        if attention and rows != expected:
            raise TensorMismatch(
                f"{ranks.files[min(ranks.files)]}: its args have attention_output_gate, which makes {expected} rows of q, k and v; "
                f"layer {index} has {rows}. If the args are wrong, give --config with the Hugging Face directory of the model",
                code="misshapen-tensor",
            )


def _require_matrices(ranks: Ranks, names: SizeTensors) -> None:
    """Raises TensorMismatch unless these tensors are matrices, because both axes are read as sizes."""
    matrices = (names.embedding, names.fc1 + ".weight", names.fc2 + ".weight", "mlp.router.weight")
    for chunk in (chunk for pp_rank in range(ranks.pp) for chunk in ranks.dense(0, pp_rank)):
        for name, tensor in chunk.items():
            if name.endswith(matrices) and ".experts." not in name and len(tensor.shape) != 2:
                raise TensorMismatch(f"{name} should be a matrix, found {list(tensor.shape)}")


def _find_mlp(
    layers: Mapping[int, Weights], layout: Layout, args: Namespace, names: SizeTensors
) -> dict[str, Any]:
    """The fields of MLPs. Without dense layers, tensors don't show their width, and only args show the gate."""
    fc1, fc2 = names.fc1 + ".weight", names.fc2 + ".weight"
    widths = [layout.tp * layer[fc2].shape[-1] for layer in layers.values() if fc2 in layer]
    # In a gated layer, the first matrix has two rows per column of the second. If all layers have experts, a shared one
    # shows it.
    pairs = (
        (fc1, fc2),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
    )
    both = [
        (layer[up], layer[down])
        for up, down in pairs
        for layer in layers.values()
        if up in layer and down in layer
    ]
    shown = all(first.shape[0] == 2 * second.shape[-1] for first, second in both)
    found: dict[str, Any] = {
        "mlp.gated": shown if both else not getattr(args, "squared_relu", False),
        "mlp.bias": any(
            names.fc2 + ".bias" in layer or "mlp.router.bias" in layer for layer in layers.values()
        ),
    }
    if widths:
        found["mlp.ffn"] = widths[0]
    return found


def _find_relative(first: Weights) -> dict[str, Any]:
    table = first.get("encoder_relative_pos_emb.relative_attention_bias.weight")
    return (
        {} if table is None else {"positions.kind": "relative", "positions.buckets": table.shape[0]}
    )


def _is_tied(last: Weights, layout: Layout, args: Namespace, names: SizeTensors) -> bool:
    if names.head not in last:
        return not getattr(args, "untie_embeddings_and_output_weights", False)
    may_be_copy = names.head == names.tied_copy and layout.pp > 1
    return may_be_copy and not getattr(args, "untie_embeddings_and_output_weights", False)


def _find_experts(layers: Mapping[int, Weights]) -> dict[str, Any]:
    routers = {
        index: layer["mlp.router.weight"]
        for index, layer in layers.items()
        if "mlp.router.weight" in layer
    }
    if not routers:
        return {}
    first = min(routers)
    latent = layers[first].get("mlp.fc1_latent_proj.weight")
    return {
        "experts.count": routers[first].shape[0],
        "experts.router_bias": "mlp.router.expert_bias" in layers[first],
        "experts.shared_gate": "mlp.shared_experts.gate_weight" in layers[first],
        "experts.latent": int(latent.shape[0]) if latent is not None else 0,
    }


def _layers(ranks: Ranks, layout: Layout, before_number: str) -> Iterator[tuple[int, Weights]]:
    """(global layer, its weights on tensor rank 0, without the layer's prefix)."""
    for chunk in layout.chunks():
        found: dict[str, Weights] = {}
        for name, tensor in ranks.dense(0, chunk.pp_rank)[chunk.vpp_rank].items():
            if name.startswith(before_number):
                number, _, inner = name.removeprefix(before_number).partition(".")
                found.setdefault(number, {})[inner] = tensor
        for local in range(chunk.layers):
            yield chunk.first_layer + local, found.get(str(local), {})


def expert_tensor_parallel_size(ranks: Ranks, moe_ffn: int, experts: int) -> int:
    """The expert tensor-parallel size according to the shape of a shard: some tools write wrong args.

    The tensor-parallel size if all layers are dense, so that no shard shows it.
    """
    for chunk in (chunk for chunks in ranks.weights.values() for chunk in chunks):
        for name, tensor in chunk.items():
            if ".experts." in name and "linear_fc2.weight" in name:
                return moe_ffn // int(tensor.shape[-1]) or 1
            if name.endswith(".experts.weight2"):
                return moe_ffn * experts // ranks.ep // int(tensor.shape[0]) or 1
    return ranks.tp
