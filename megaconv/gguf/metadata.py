"""Makes the metadata of a GGUF file: the sizes and rules by which llama.cpp builds a model. config.py reads them.

    llama.embedding_length 4096         hidden
    llama.attention.head_count_kv 8     attention.kv_heads

This module ignores features that llama.cpp computes without a key, such as the activation, or which layers have
experts. The saver reads back what it wrote, and refuses a model that differs then.
"""

from collections.abc import Callable, Mapping
from math import log, sqrt
from typing import Any

from formats.gguf import Value
from formats.lazy_numpy import Floats, np
from formats.wording import counted
from megaconv.errors import NotExpressible
from megaconv.families.parts.latent_attention import LATENT_EPSILON
from megaconv.gguf.architectures import BY_FAMILY, numbers_of
from megaconv.gguf.llama3_scaling import llama3_divisors
from megaconv.gguf.names import ARCHITECTURES, LLAMA3, SHARED_HEADS, full_every
from megaconv.model.config import ModelConfig

Metadata = dict[str, Value]
_Scaling = Mapping[str, Any]

_SCORES = {"softmax": 1, "sigmoid": 2}
"""Function that turns a router's logits into weights -> llama.cpp's number of it."""
_ORIGINAL, _CONTEXT = "original_max_position_embeddings", "original_context_length"
_LITE_LAYERS = (26, 27)
"""Numbers of layers for which a deepseek2 model has no latent vector of queries, whatever its metadata say."""


def metadata(config: ModelConfig, file_type: int) -> Metadata:
    """The metadata of a model. Raises NotExpressible, which names the field, for a value without a key.

    file_type: GGUF's number of the type in which most matrices are stored.
    """
    architecture = ARCHITECTURES[config.family]
    sizes = _sizes(config, architecture) | _experts(config, architecture) | _scaling(config)
    own = _OWN.get(architecture)
    sizes |= own(config) if own else {}
    if config.family in BY_FAMILY:
        sizes |= {name: _valued(value) for name, value in numbers_of(config).items()}
    general = {
        "general.architecture": Value("string", architecture),
        "general.type": Value("string", "model"),
        "general.file_type": Value("u32", file_type),
        "general.quantization_version": Value("u32", 2),
    }
    return general | {f"{architecture}.{name}": value for name, value in sizes.items()}


def _valued(value: float) -> Value:
    if isinstance(value, bool):
        return Value("bool", value)
    return Value("f32", value) if isinstance(value, float) else Value("u32", value)


def notices(config: ModelConfig) -> tuple[str, ...]:
    """Differences between llama.cpp's and transformers' computation that remain although the file has the values."""
    found = []
    if config.latent.kv_rank and config.norm.epsilon != LATENT_EPSILON:
        found.append(
            f"the norms of the latent vectors have epsilon {LATENT_EPSILON:g} in transformers and {config.norm.epsilon:g}, that of all "
            "other norms, in llama.cpp: logits differ slightly"
        )
    if (
        config.family == "phi3"
        and config.window is not None
        and config.window < config.max_positions
    ):
        found.append(
            f"llama.cpp leaves out Phi-3's window of {config.window:,} positions: it attends to all, and differs beyond that many"
        )
    if (config.positions.scaling or {}).get("rope_type") == "longrope":
        found.append(
            "llama.cpp takes longrope's long_factor for every text where its context is longer than original_max_position_embeddings, "
            "transformers for texts that are"
        )
    return tuple(found)


def _sizes(config: ModelConfig, architecture: str) -> Metadata:
    attention = config.attention
    epsilon = "layer_norm_epsilon" if config.norm.kind == "LayerNorm" else "layer_norm_rms_epsilon"
    sizes = {
        "block_count": Value("u32", config.layer_count),
        "context_length": Value("u32", config.max_positions),
        "embedding_length": Value("u32", config.hidden),
        "feed_forward_length": Value("u32", config.mlp.ffn),
        "attention.head_count": Value("u32", attention.heads),
        f"attention.{epsilon}": Value("f32", config.norm.epsilon),
    }
    if architecture != "gpt2":
        sizes["attention.head_count_kv"] = Value("u32", attention.kv_heads)
    if architecture != "gpt2" and (architecture != "gemma" or config.positions.theta != 10000.0):
        sizes["rope.freq_base"] = Value("f32", config.positions.theta)
    given = (config.hf or {}).get(
        "head_dim"
    ) is not None or attention.heads * attention.head_dim != config.hidden
    if given and architecture not in (*SHARED_HEADS, "deepseek2"):
        sizes["attention.key_length"] = sizes["attention.value_length"] = Value(
            "u32", attention.head_dim
        )
    if architecture == "llama":
        sizes |= {
            "vocab_size": Value("u32", config.vocab),
            "rope.dimension_count": Value("u32", attention.head_dim),
        }
    return sizes


def _experts(config: ModelConfig, architecture: str) -> Metadata:
    experts = config.experts
    if not experts.count:
        return {}
    found = {
        "expert_count": Value("u32", experts.count),
        "expert_used_count": Value("u32", experts.per_token),
    }
    return (
        found
        if architecture == "llama"
        else found | {"expert_feed_forward_length": Value("u32", experts.ffn)}
    )


def _latent(config: ModelConfig) -> Metadata:
    """The metadata of deepseek2. llama.cpp computes latent attention with one key and value for all heads: the latent
    vector and the rotating elements.

    Expert selection always follows the family, even if its config.json leaves it out: without a key llama.cpp uses
    softmax.
    """
    _require_latent_expressible(config)
    attention, latent, experts = config.attention, config.latent, config.experts
    sizes = {
        "vocab_size": Value("u32", config.vocab),
        "attention.head_count_kv": Value("u32", 1),
        "attention.kv_lora_rank": Value("u32", latent.kv_rank),
        "attention.key_length": Value("u32", latent.kv_rank + latent.rope_dim),
        "attention.value_length": Value("u32", latent.kv_rank),
        "attention.key_length_mla": Value("u32", attention.head_dim),
        "attention.value_length_mla": Value("u32", latent.v_dim),
        "rope.dimension_count": Value("u32", latent.rope_dim),
        "leading_dense_block_count": Value("u32", min(config.layers_with("moe"))),
        "expert_shared_count": Value("u32", experts.shared_ffn // experts.ffn),
        "expert_weights_scale": Value("f32", experts.scale or 1.0),
        "expert_weights_norm": Value("bool", experts.renormalize),
        "expert_gating_func": Value("u32", _SCORES[experts.score]),
    }
    # llama.cpp requires the key unless the number of layers is that of a lite model. 0 means no latent vector.
    if latent.q_rank or config.layer_count not in _LITE_LAYERS:
        sizes["attention.q_lora_rank"] = Value("u32", latent.q_rank)
    if experts.groups and experts.groups != experts.group_topk:
        sizes["expert_group_count"] = Value("u32", experts.groups)
        sizes["expert_group_used_count"] = Value("u32", experts.group_topk)
    return sizes


def _require_latent_expressible(config: ModelConfig) -> None:
    layers, experts = config.layers_with("moe"), config.experts
    if (
        not layers
        or min(layers) + len(layers) != config.layer_count
        or experts.shared_ffn % experts.ffn
    ):
        raise NotExpressible(
            "--saver gguf: this mixture of experts is not supported: from some layer on every one has experts, shared ones as wide as "
            "the others"
        )
    if config.latent.q_rank and config.layer_count in _LITE_LAYERS:
        raise NotExpressible(
            f"--saver gguf: the model has {counted(config.layer_count, 'layer')} and queries of a latent vector (q_lora_rank "
            f"{config.latent.q_rank}); llama.cpp takes deepseek2 models of {' or '.join(map(str, _LITE_LAYERS))} layers for V2 Lite, "
            "which has none"
        )


# Positions.


def _scaling(config: ModelConfig) -> Metadata:
    write = {"linear": _linear, "yarn": _yarn, "longrope": _longrope}.get(
        _kind_of_scaling(config) or ""
    )
    scaling = {
        name: value for name, value in (config.positions.scaling or {}).items() if value is not None
    }
    return (
        {f"rope.scaling.{name}": value for name, value in write(config, scaling).items()}
        if write
        else {}
    )


def _kind_of_scaling(config: ModelConfig) -> str | None:
    """The kind of rope scaling. Raises NotExpressible if llama.cpp's architecture doesn't compute it."""
    scaling = config.positions.scaling or {}
    kind = scaling.get("rope_type")
    architecture = ARCHITECTURES[config.family]
    if kind is not None and architecture not in _SCALED.get(kind, ()):
        usable = [each for each, architectures in _SCALED.items() if architecture in architectures]
        supported = ", ".join(usable) or "none"
        raise NotExpressible(
            f"--saver gguf: rope scaling {kind!r} is not supported for {config.family}; "
            f"supported: {supported}"
        )
    return kind


def _linear(config: ModelConfig, scaling: _Scaling) -> Metadata:
    return {"type": Value("string", "linear"), "factor": Value("f32", scaling["factor"])}


_YARN = {
    "rope_type",
    "factor",
    _ORIGINAL,
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
}


def _yarn(config: ModelConfig, scaling: _Scaling) -> Metadata:
    """The metadata of yarn. deepseek2 needs equal mscale and mscale_all_dim, stored as a tenth; the others must have
    neither.

    llama.cpp has keys for the betas, but doesn't read them for these architectures.
    """
    is_latent, mscale = bool(config.latent.kv_rank), scaling.get("mscale") or None
    betas = (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    mscale_all_dim = scaling.get("mscale_all_dim") or None
    has_usable_factor = bool(mscale) == is_latent and mscale == mscale_all_dim
    has_usable_range = betas == (32, 1) and scaling.get("truncate", True)
    has_usable_keys = _ORIGINAL in scaling and not scaling.keys() - _YARN
    if not (has_usable_factor and has_usable_range and has_usable_keys):
        factor = "the attention factor that follows from its factor"
        if is_latent:
            factor = "one number for mscale and mscale_all_dim"
        raise NotExpressible(
            f"--saver gguf: rope scaling {dict(scaling)} is not supported for {config.family}: llama.cpp has yarn with {factor}, "
            f"{_ORIGINAL}, beta_fast 32, beta_slow 1 and a range of whole dimensions"
        )
    found = {
        "type": Value("string", "yarn"),
        "factor": Value("f32", scaling["factor"]),
        _CONTEXT: Value("u32", scaling[_ORIGINAL]),
    }
    return found | ({"yarn_log_multiplier": Value("f32", 0.1 * mscale)} if mscale else {})


def _longrope(config: ModelConfig, scaling: _Scaling) -> Metadata:
    """The metadata of phi3's longrope. The divisors of the frequencies are tensors."""
    original = scaling[_ORIGINAL]
    factor = scaling.get("factor") or config.max_positions / original
    usual = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    return {
        _CONTEXT: Value("u32", original),
        "attn_factor": Value("f32", scaling.get("attention_factor") or usual),
    }


def divisors(config: ModelConfig) -> dict[str, Floats]:
    """Tensor name -> divisors of the frequencies, [rotating elements / 2]; empty if metadata alone scale the positions.

    Raises NotExpressible, as metadata does.
    """
    kind, scaling = _kind_of_scaling(config), config.positions.scaling or {}
    if kind == "llama3":
        return {LLAMA3: llama3_divisors(scaling, config.attention.head_dim, config.positions.theta)}
    if kind == "longrope":
        return {
            f"rope_factors_{each}.weight": np.array(scaling[f"{each}_factor"], np.float32)
            for each in ("long", "short")
        }
    return {}


# Metadata of further architectures.


def _phi3(config: ModelConfig) -> Metadata:
    rotating = int(config.attention.head_dim * config.positions.rotary_percent)
    found = {
        "rope.dimension_count": Value("u32", rotating),
        "attention.sliding_window": Value("u32", config.window or 0),
    }
    original = (
        {}
        if config.positions.scaling
        else {f"rope.scaling.{_CONTEXT}": Value("u32", config.max_positions)}
    )
    return found | original


def _qwen2_moe(config: ModelConfig) -> Metadata:
    return {"expert_shared_feed_forward_length": Value("u32", config.experts.shared_ffn)}


def _gemma2(config: ModelConfig) -> Metadata:
    """The metadata of Gemma 2 and 3. The window pattern is written only if it differs from llama.cpp's default."""
    windowed = [layer.window is not None for layer in config.layers]
    every = full_every(config.family)
    usual = [bool((layer + 1) % every) for layer in range(config.layer_count)]
    found: Metadata = {}
    if config.window is not None:
        found["attention.sliding_window"] = Value("u32", config.window)
    if windowed != usual and any(windowed):
        found["attention.sliding_window_pattern"] = Value("bool", windowed)
    numbers = {
        "rope.freq_base_swa": config.positions.local_theta,
        "attn_logit_softcapping": config.attention.score_cap,
        "final_logit_softcapping": config.head.logit_cap,
    }
    for name, number in numbers.items():
        if number is not None:
            found[name] = Value("f32", number)
    return found


_OWN: Mapping[str, Callable[[ModelConfig], Metadata]] = {
    "deepseek2": _latent, "phi3": _phi3, "qwen2moe": _qwen2_moe, "gemma2": _gemma2, "gemma3": _gemma2,
}  # fmt: skip
_ROPE = ("llama", "qwen2", "qwen3", "qwen3moe")
_SCALED = {
    "llama3": ("llama",),
    "linear": (*_ROPE, "gemma3"),
    "yarn": (*_ROPE, "deepseek2"),
    "longrope": ("phi3",),
}
"""Kind of rope scaling -> architectures for which llama.cpp computes it."""
