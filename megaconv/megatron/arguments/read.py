"""Reads Megatron's `args`, the namespace in every rank file: the model's configuration and the run's layout.

The names of old and new releases are read (norm epsilon and zero-centered gamma were renamed). Source: as in
`write.py`.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint, LayoutError, UnknownFamily
from megaconv.families import Family, recognize
from megaconv.families import family as family_named
from megaconv.megatron.arguments.beyond_core import read_beyond_core, require_beyond_core
from megaconv.megatron.arguments.check import check_arguments
from megaconv.megatron.arguments.encoder import read_encoder, sees_both_ways
from megaconv.megatron.arguments.latent import read_latent
from megaconv.megatron.arguments.linear import read_linear
from megaconv.megatron.arguments.mamba import NEEDED_OF_MAMBA, read_mamba, stages_of
from megaconv.megatron.arguments.null_tokenizer import adds_a_token
from megaconv.megatron.arguments.retrieval import NEEDED_OF_RETRIEVAL, read_retrieval
from megaconv.megatron.arguments.rope import read_scaling
from megaconv.megatron.arguments.router import read_own_router
from megaconv.megatron.arguments.shown import warn_of_contradictions
from megaconv.megatron.arguments.sparse import read_sparse
from megaconv.model.ceilings import RANKS
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed, from_fields, per_layer
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megaconv.model.subjects import RANKED_BY


def from_arguments(
    args: Namespace, found: Mapping[str, Any], *, legacy: bool = False, family: str | None = None
) -> ModelConfig:
    """The model that args describe.

    found: fields of the configuration that the tensors show. They override args, which some tools write wrongly.
    legacy: True for a model from before Megatron core. family: the family's name; None: recognise the family.
    Raises CorruptCheckpoint if args lack a field that tensors can't show, UnknownFamily for a model of no known family.
    """
    given = read_fields(args, found, legacy=legacy)
    needed = _NEEDED | (_NEEDED_OF_EXPERTS if given.get("experts.count") else {})
    needed |= NEEDED_OF_MAMBA if "mamba.heads" in found else {}
    needed |= NEEDED_OF_RETRIEVAL if found.get("retrieval.layers") else {}
    for field, argument in needed.items():
        if field not in given:
            _need(args, argument)
    unnamed = from_fields("", given)
    member: Family = recognize(unnamed) if family is None else family_named(family)
    require_beyond_core(given, member)
    return changed(replace(unnamed, family=member.name), member.assumed(given))


IN_TENSORS = (
    *(
        "layers.count",
        "layers.mixer",
        "layers.mlp",
        "hidden",
        "vocab",
        "tie_embeddings",
        "mtp_layers",
        "mlp.ffn",
        "mlp.bias",
    ),
    *(
        "mlp.gated",
        "attention.qkv_bias",
        "attention.o_bias",
        "attention.qk_norm",
        "attention.sinks",
        "experts.count",
    ),
    *(
        "experts.router_bias",
        "experts.shared_gate",
        "experts.latent",
        "norm.kind",
        "norm.final",
        "retrieval.layers",
        "encoder.layers",
        "head.bias",
        "head.binary",
        "head.classes",
        "head.choices",
        "head.labels",
        "head.labels_bias",
        "retriever.towers",
        "retriever.projection",
        "retriever.pooler",
    ),
    *("token_types", "positions.buckets"),
)
"""Fields that a checkpoint's tensors show, independently of its args."""


def tensor_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that the tensors of a model will show."""
    given = {name: value_of(config, name) for name in IN_TENSORS}
    if config.norm.place in ("after", "both", "by_mixer"):
        given["norm.place"] = config.norm.place
    if config.has("mamba_layers"):
        given |= {"mamba.heads": config.mamba.heads, "mamba.head_dim": config.mamba.head_dim}
    if config.has("convolution_layers"):
        given["convolution.width"] = config.convolution.width
    if config.has("kda_layers"):
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "conv")
        given |= {f"linear.{name}": getattr(config.linear, name) for name in sizes}
    return given | ({"head.activation": "gelu"} if config.head.activation else {})


_NEEDED = {
    "attention.heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "mlp.ffn": "ffn_hidden_size",
}
"""Fields without a default -> the argument that must give them."""
_NEEDED_OF_EXPERTS = {"experts.per_token": "moe_router_topk", "experts.ffn": "ffn_hidden_size"}


def read_fields(
    args: Namespace, found: Mapping[str, Any], *, legacy: bool = False
) -> dict[str, Any]:
    """Fields of the configuration by dotted name, from args and from the tensors, without defaults.

    Raises UnknownFamily for a value that no model family has, CorruptCheckpoint for an impossible value.
    """
    check_arguments(args, found, legacy=legacy)
    given = (
        _attention(args, found)
        | _mlp(args, found)
        | _norm(args)
        | _positions(args)
        | _windows(args, found)
    )
    given |= _rotating_layers(args, found)
    if found.get("experts.count"):
        given |= _experts(args)
    if "mamba.heads" in found:
        given |= read_mamba(args, given.get("norm.epsilon"))
    given |= read_retrieval(args, found, legacy=legacy)
    warn_of_contradictions(args, given, found)
    given |= found
    if given.get("encoder.layers") or sees_both_ways(given):
        return given | read_encoder(args, given, legacy=legacy)
    return given | read_latent(args) | read_linear(args) | read_sparse(args)


def _attention(args: Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    heads = getattr(args, "num_attention_heads", None)
    if heads is None:
        return {}
    given = {"attention.heads": heads}
    groups = (
        _need(args, "num_query_groups") if getattr(args, "group_query_attention", False) else heads
    )
    width = getattr(args, "kv_channels", None) or found["hidden"] // heads
    given |= {"attention.kv_heads": groups, "attention.head_dim": width} | read_beyond_core(
        args, width
    )
    # The tensors show the norms of q and k, except in a model whose layers are all linear.
    for name, field in _FLAGS.items():
        if hasattr(args, name):
            given[field] = bool(getattr(args, name))
    return given


_FLAGS = {
    "attention_output_gate": "attention.output_gate",
    "qk_layernorm": "attention.qk_norm",
    "qk_l2_norm": "attention.qk_l2_norm",
}
"""Arguments of attention that are switches."""
_FIELDS = {
    "normalization": "norm.kind",
    "max_position_embeddings": "max_positions",
    "activation_func_clamp_value": "mlp.clamp",
    "ffn_hidden_size": "mlp.ffn",
    "glu_linear_offset": "mlp.offset",
    "moe_router_topk": "experts.per_token",
    "moe_router_score_function": "experts.score",
    "moe_router_topk_scaling_factor": "experts.scale",
    "moe_router_num_groups": "experts.groups",
    "moe_router_group_topk": "experts.group_topk",
}
"""Arguments with the same meaning as a field."""


def _given(args: Namespace, *names: str) -> dict[str, Any]:
    return {
        _FIELDS[name]: getattr(args, name)
        for name in names
        if getattr(args, name, None) is not None
    }


def _norm(args: Namespace) -> dict[str, Any]:
    epsilon = _first(args, "norm_epsilon", "layernorm_epsilon")
    centered = _first(args, "layernorm_zero_centered_gamma", "apply_layernorm_1p")
    if centered is not None:
        names = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
        centered = any(getattr(args, name, False) for name in names)
    given = {"norm.epsilon": epsilon, "norm.zero_centered": centered}
    return _given(args, "normalization") | {
        name: value for name, value in given.items() if value is not None
    }


def _positions(args: Namespace) -> dict[str, Any]:
    given = _given(args, "max_position_embeddings")
    kind = getattr(args, "position_embedding_type", None)
    if kind is not None:
        given["positions.kind"] = {"learned_absolute": "learned", "yarn": "rope"}.get(kind, kind)
    bases = getattr(args, "rotary_base", None)
    if isinstance(bases, (list, tuple)):
        given["positions.local_theta"], given["positions.theta"] = map(float, bases)
    elif bases is not None:
        given["positions.theta"] = float(bases)
    if getattr(args, "rotary_percent", None) is not None:
        given["positions.rotary_percent"] = float(args.rotary_percent)
    if getattr(args, "rotary_interleaved", None) is not None:
        given["positions.interleaved"] = bool(args.rotary_interleaved)
    scaling = (
        "use_rope_scaling",
        "rotary_seq_len_interpolation_factor",
        "position_embedding_type",
        "enable_gpt_oss",
    )
    if any(hasattr(args, name) for name in scaling):
        given["positions.scaling"] = read_scaling(args)
    return given


def _rotating_layers(args: Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for layers without rotary positions.

    no_rope_freq gives these layers: every n-th layer, or a list with a 1 for each.
    """
    freq, layers = getattr(args, "no_rope_freq", None), found["layers.count"]
    if not freq:
        return {}
    listed = isinstance(freq, (list, tuple))
    if listed and len(freq) != layers:
        raise CorruptCheckpoint(
            f"the checkpoint's no_rope_freq is about {counted(len(freq), 'layer')}, the model has {layers}"
        )
    if not listed and type(freq) is not int:
        raise CorruptCheckpoint(
            f"the checkpoint's no_rope_freq should be a number or a list, found {freq!r:.100}"
        )
    without = [
        layer for layer in range(layers) if (freq[layer] if listed else not (layer + 1) % freq)
    ]
    return {"layers.rotates": per_layer(without, layers, False, True)}


def _windows(args: Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(args, "window_size"):
        return {}
    size = args.window_size
    pattern = getattr(args, "window_attn_skip_freq", None)
    layers = found["layers.count"]
    if not size or size[0] < 0:
        return {"layers.window": None}
    if size[1] != 0:
        raise UnknownFamily(
            f"the checkpoint's window_size is {tuple(size)!r:.100}: right window {size[1]!r:.20}; only 0 is supported"
        )
    if pattern is None:
        return {"layers.window": size[0] + 1}
    with_window = [
        layer
        for layer in range(layers)
        if (pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern)
    ]
    return {"layers.window": per_layer(with_window, layers, size[0] + 1, None)}


def _experts(args: Namespace) -> dict[str, Any]:
    given = _given(
        args, "moe_router_topk", "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk",
    )  # fmt: skip
    softmax = given.get("experts.score", "softmax") == "softmax"
    _check_groups(given)
    width = _first(args, "moe_ffn_hidden_size", "ffn_hidden_size")
    if width is not None:
        given["experts.ffn"] = width
    return given | {
        "experts.shared_ffn": getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        "experts.renormalize": not getattr(args, "moe_router_pre_softmax", False)
        if softmax
        else given.get("experts.per_token") != 1,
        "experts.probs_on_input": bool(getattr(args, "moe_apply_probs_on_input", False)),
        **read_own_router(args),
    }


def _check_groups(given: Mapping[str, Any]) -> None:
    """Check the ranking of expert groups. Raises UnknownFamily.

    Megatron ranks a group by its best moe_router_topk // moe_router_group_topk experts, all model families by its best
    two.
    """
    chosen, per_token = given.get("experts.group_topk"), given.get("experts.per_token", 0)
    best = per_token // chosen if chosen else RANKED_BY
    if given.get("experts.groups", 1) > 1 and best != RANKED_BY:
        raise UnknownFamily(
            f"the checkpoint chooses {per_token} experts (moe_router_topk) of {chosen} groups (moe_router_group_topk): "
            f"Megatron then ranks a group by its best {best}, all supported model families by its best {RANKED_BY}"
        )


def _mlp(args: Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    given = _given(args, "activation_func_clamp_value", "glu_linear_offset", "ffn_hidden_size")
    names = ("squared_relu", "quick_geglu", "swiglu", "bias_gelu_fusion", "openai_gelu")
    if any(hasattr(args, name) for name in names) or not found["mlp.gated"]:
        given["mlp.activation"] = _activation(args, gated=found["mlp.gated"])
    return given


def _activation(args: Namespace, *, gated: bool) -> str:
    if getattr(args, "squared_relu", False):
        return "relu2"
    if gated and getattr(args, "quick_geglu", False):
        return "quick_gelu"
    if gated and getattr(args, "swiglu", True):
        return "silu"
    return (
        "gelu_tanh"
        if getattr(args, "bias_gelu_fusion", False) or getattr(args, "openai_gelu", False)
        else "gelu"
    )


def _need(args: Namespace, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise CorruptCheckpoint(
            f"the checkpoint's args don't say {name}; give --config with the Hugging Face directory of the model"
        )
    return value


def _first(args: Namespace, *names: str) -> Any:
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)


def read_layout(args: Namespace, config: ModelConfig) -> Layout:
    """The layout that args give; a single rank if they give no layout that fits the model's layers."""

    def size(name: str) -> int | None:
        value = getattr(args, name, None)
        return value if type(value) is int and 0 < value <= RANKS else None

    pattern, listed = getattr(args, "pipeline_model_parallel_layout", None), stages_of(args)
    split = LayerSplit(
        layers=listed,
        first=size("decoder_first_pipeline_num_layers"),
        last=size("decoder_last_pipeline_num_layers"),
        account_for_embedding=getattr(args, "account_for_embedding_in_pipeline_split", False)
        is True,
        account_for_loss=getattr(args, "account_for_loss_in_pipeline_split", False) is True,
        pattern=pattern if isinstance(pattern, str) else None,
    )
    tp, pp = size("tensor_model_parallel_size") or 1, size("pipeline_model_parallel_size") or 1
    vpp = len(listed) // pp if listed else size("virtual_pipeline_model_parallel_size") or 1
    try:
        stages = split_layers(config.layer_count, pp, vpp, split)
    except LayoutError:
        pp, vpp, stages = 1, 1, (config.layer_count,)
    if not config.experts.count:
        return Layout(tp, pp, vpp, stage_layers=stages)
    return Layout(
        tp, pp, vpp, size("expert_model_parallel_size") or 1, size("expert_tensor_parallel_size") or tp, stages
    )  # fmt: skip


def true_vocab(args: Namespace, padded: int, tp: int) -> int | None:
    """The vocabulary size that args give; None if they give no plausible one."""
    vocab = getattr(args, "vocab_size", None)
    if not isinstance(vocab, int):
        return None
    if adds_a_token(args):
        vocab += 1
    divisor = getattr(args, "make_vocab_size_divisible_by", None) or 128
    return vocab if 0 <= padded - vocab < divisor * tp else None
