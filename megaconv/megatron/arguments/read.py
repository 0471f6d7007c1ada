"""Megatron's `args`, the namespace in every rank file, read: the model's configuration and the run's layout.

Under the names of old and new releases alike (norm epsilon and zero-centered gamma were renamed). Source: as `args.py`,
which writes them.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, LayoutError, UnknownFamily
from megaconv.megatron.arguments.encoder import POST_NORM, read_encoder
from megaconv.megatron.arguments.latent import read_latent
from megaconv.megatron.arguments.write import LLAMA3_SCALING, YARN, YARN_TRUNCATE
from megaconv.model.ceilings import RANKS
from megaconv.model.config import ModelConfig
from megaconv.model.layout import LayerSplit, Layout, split_layers


def from_arguments(args: Namespace, found: Mapping[str, Any], *, legacy: bool = False) -> ModelConfig:
    """The configuration that args describe.

    found: what the tensors say, as fields of ModelConfig; it wins over args, which some tools write wrongly.
    legacy: whether they are of one of the models before core.
    Raises CorruptCheckpoint where args lack something that tensors can't tell, UnknownFamily for what isn't Llama-like.
    """
    _require_known(args, post_norm=legacy and "head_activation" in found)
    heads = _need(args, "num_attention_heads")
    grouped = getattr(args, "group_query_attention", False)
    positions = getattr(args, "position_embedding_type", "rope")
    window, pattern = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": _need(args, "num_query_groups") if grouped else heads,
        "head_dim": getattr(args, "kv_channels", None) or _need(args, "hidden_size") // heads,
        "max_positions": _need(args, "max_position_embeddings"),
        "positions": {"learned_absolute": "learned", "yarn": "rope"}.get(positions, positions),
        "normalization": getattr(args, "normalization", "RMSNorm"),
        "activation": _read_activation(args, found["gated"]),
        "glu_limit": getattr(args, "activation_func_clamp_value", None),
        "glu_offset": getattr(args, "glu_linear_offset", None) or 0.0,
        "norm_epsilon": _first(args, "norm_epsilon", "layernorm_epsilon", default=1e-5),
        "rope_theta": float(getattr(args, "rotary_base", 10000)),
        "rope_scaling": _read_scaling(args),
        "rotary_percent": float(getattr(args, "rotary_percent", 1.0)),
        "sliding_window": window[0] + 1 if window and window[0] >= 0 else None,
    }
    if found.get("experts"):
        fields |= _read_experts(args, found["layers"])
    if fields["sliding_window"] and pattern is not None:
        layers = range(found["layers"])
        windowed = [
            layer for layer in layers if (pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern)
        ]
        fields["windowed_layers"] = tuple(windowed) if len(windowed) < len(layers) else None
    fields |= found
    if fields.get("encoder_layers") or fields.get("head_activation"):
        return ModelConfig(**fields | read_encoder(args, fields, legacy=legacy))
    fields |= read_latent(args)
    spellings = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
    fields["zero_centered_norm"] = any(getattr(args, name, False) for name in spellings)
    family = _family(fields)
    if family == "gemma":
        fields["embedding_scale"] = fields["hidden"] ** 0.5
    if family != "glm4_moe" and fields["rotary_percent"] != 1.0:
        raise UnknownFamily(
            f"the checkpoint's rotary_percent is {fields['rotary_percent']}, which no family has that it could be of"
        )
    return ModelConfig(family=family, **fields)


def _read_experts(args: Namespace, layers: int) -> dict[str, Any]:
    score = getattr(args, "moe_router_score_function", "softmax")
    return {
        "experts_per_token": _need(args, "moe_router_topk"),
        "moe_ffn": getattr(args, "moe_ffn_hidden_size", None) or _need(args, "ffn_hidden_size"),
        "shared_ffn": getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        "router_score": score,
        "renormalize": score != "softmax" or not getattr(args, "moe_router_pre_softmax", False),
        "router_scale": getattr(args, "moe_router_topk_scaling_factor", None),
        "router_groups": getattr(args, "moe_router_num_groups", None),
        "router_group_topk": getattr(args, "moe_router_group_topk", None),
    }


_GPT_OSS = {
    "positions": "rope", "normalization": "RMSNorm", "activation": "quick_gelu", "gated": True, "glu_offset": 1.0,
    "sinks": True, "mlp_bias": True,
}  # fmt: skip


def _family(fields: Mapping[str, Any]) -> str:
    if fields.get("sinks") or fields["activation"] == "quick_gelu" or fields["glu_offset"] or fields["glu_limit"]:
        return _family_of_sinks(fields)
    llama_like = (
        fields["positions"] == "rope" and fields["normalization"] == "RMSNorm" and fields["activation"] == "silu"
    )
    if fields["zero_centered_norm"]:
        return _family_of_zero_centered(fields)
    if fields.get("kv_rank"):
        return _family_of_latent(fields)
    if fields.get("experts") and llama_like:
        return _family_of_experts(fields)
    if fields["positions"] == "learned" and fields["normalization"] == "LayerNorm" and not fields["gated"]:
        return "gpt2"
    if not llama_like:
        what = ", ".join(f"{name} {fields[name]}" for name in ("positions", "normalization", "gated", "activation"))
        raise UnknownFamily(f"the checkpoint is of no model family that we know ({what})")
    if fields.get("qk_norm"):
        return "qwen3"
    if fields.get("qkv_bias") and not fields.get("o_bias"):
        return "qwen2"
    return "mistral" if fields.get("sliding_window") and not fields.get("windowed_layers") else "llama"


def _family_of_sinks(fields: Mapping[str, Any]) -> str:
    differs = [f"{name} {fields.get(name)}" for name, value in _GPT_OSS.items() if fields.get(name) != value]
    differs += [f"no {name}" for name in ("experts", "glu_limit") if not fields.get(name)]
    if differs or fields.get("kv_rank") or fields["zero_centered_norm"]:
        what = ", ".join(differs) or "another attention, or other norms"
        raise UnknownFamily(
            f"the checkpoint has sinks (softmax_type) or a clamped quick geglu, as only GPT-OSS has, but differs from it: {what}"
        )
    return "gpt_oss"


_GEMMA = {"positions": "rope", "normalization": "RMSNorm", "activation": "gelu_tanh", "gated": True}


def _family_of_zero_centered(fields: Mapping[str, Any]) -> str:
    differs = [name for name, value in _GEMMA.items() if fields.get(name) != value]
    differs += [name for name in ("experts", "qk_norm", "sliding_window", "kv_rank") if fields.get(name)]
    if differs:
        raise UnknownFamily(
            f"the checkpoint's norms are zero-centered, as only Gemma's are, whose {differs[0]} it hasn't; no family that we know fits"
        )
    return "gemma"


def _family_of_latent(fields: Mapping[str, Any]) -> str:
    routing = (fields.get("router_score"), bool(fields.get("router_bias")), fields.get("renormalize"))
    known = {("sigmoid", True, True): "deepseek_v3", ("softmax", False, False): "deepseek_v2"}
    if routing not in known:
        raise UnknownFamily(
            "the checkpoint has latent attention, but not the experts of DeepSeek-V2 (softmax before the choice) or V3 (sigmoid, bias)"
        )
    return known[routing]


def _family_of_experts(fields: Mapping[str, Any]) -> str:
    if fields.get("router_score") == "sigmoid":
        return "glm4_moe"
    if fields.get("shared_ffn"):
        return "qwen2_moe"
    return "qwen3_moe" if fields.get("qk_norm") else "mixtral"


def _read_activation(args: Namespace, gated: bool) -> str:
    if gated and getattr(args, "quick_geglu", False):
        return "quick_gelu"
    if gated and getattr(args, "swiglu", True):
        return "silu"
    return "gelu_tanh" if getattr(args, "bias_gelu_fusion", False) or getattr(args, "openai_gelu", False) else "gelu"


def _require_known(args: Namespace, *, post_norm: bool) -> None:
    known: dict[str, tuple[Any, ...]] = {
        "position_embedding_type": ("rope", "yarn", "learned_absolute", "relative"),
        "softmax_type": ("vanilla", "learnable"),
        "normalization": ("RMSNorm", "LayerNorm"),
        "squared_relu": (False,),
        "rotary_interleaved": (False,),
        POST_NORM: (False, True) if post_norm else (False,),
    }
    for name, values in known.items():
        actual = getattr(args, name, values[0])
        if actual not in values:
            raise UnknownFamily(
                f"the checkpoint's {name} is {actual!r}; the model families that we know have {' or '.join(map(repr, values))}"
            )


def _read_scaling(args: Namespace) -> dict[str, Any] | None:
    if getattr(args, "use_rope_scaling", False):
        return {"rope_type": "llama3", "factor": float(getattr(args, "rope_scaling_factor", 8.0)), **LLAMA3_SCALING}
    if getattr(args, "position_embedding_type", "rope") == "yarn" or getattr(args, "enable_gpt_oss", False):
        return _read_yarn(args)
    factor = getattr(args, "rotary_seq_len_interpolation_factor", None)
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _read_yarn(args: Namespace) -> dict[str, Any]:
    mscales = {name: getattr(args, YARN[name], None) for name in ("mscale", "mscale_all_dim")}
    if not all(mscales.values()):
        if mscales["mscale_all_dim"] or mscales["mscale"] not in (None, 1.0):
            raise UnknownFamily(
                f"the checkpoint's yarn has one mscale and not the other ({mscales}); no family has that"
            )
        mscales = {}
    others = {name: _need(args, argument) for name, argument in YARN.items() if not name.startswith("mscale")}
    truncate = {} if getattr(args, YARN_TRUNCATE, True) else {"truncate": False}
    return {"rope_type": "yarn", **others, **mscales, **truncate}


def _need(args: Namespace, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise CorruptCheckpoint(
            f"the checkpoint's args don't say {name}; give --config with the Hugging Face directory of the model"
        )
    return value


def _first(args: Namespace, *names: str, default: Any) -> Any:
    return next((value for name in names if (value := getattr(args, name, None)) is not None), default)


def read_layout(args: Namespace, config: ModelConfig) -> Layout:
    """The layout that args tell; a single rank where they tell none that the model's layers fit."""

    def size(name: str) -> int | None:
        value = getattr(args, name, None)
        return value if type(value) is int and 0 < value <= RANKS else None

    pattern = getattr(args, "pipeline_model_parallel_layout", None)
    split = LayerSplit(
        first=size("decoder_first_pipeline_num_layers"),
        last=size("decoder_last_pipeline_num_layers"),
        account_for_embedding=getattr(args, "account_for_embedding_in_pipeline_split", False) is True,
        account_for_loss=getattr(args, "account_for_loss_in_pipeline_split", False) is True,
        pattern=pattern if isinstance(pattern, str) else None,
    )
    tp, pp = size("tensor_model_parallel_size") or 1, size("pipeline_model_parallel_size") or 1
    vpp = size("virtual_pipeline_model_parallel_size") or 1
    try:
        stages = split_layers(config.layers, pp, vpp, split)
    except LayoutError:
        pp, vpp, stages = 1, 1, (config.layers,)
    if not config.experts:
        return Layout(tp, pp, vpp, stage_layers=stages)
    return Layout(
        tp, pp, vpp, size("expert_model_parallel_size") or 1, size("expert_tensor_parallel_size") or tp, stages
    )  # fmt: skip


def true_vocab(args: Namespace, padded: int, tp: int) -> int | None:
    """The vocabulary size that args tell, None when they don't tell one that can be true."""
    vocab = getattr(args, "vocab_size", None)
    if not isinstance(vocab, int):
        return None
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        vocab += 1  # it adds an end-of-document token
    divisor = getattr(args, "make_vocab_size_divisible_by", None) or 128
    return vocab if 0 <= padded - vocab < divisor * tp else None
