"""Command models with experts: Command A's layers, with experts in all but the first layers.

Dense first layers may have rope without a window. Shared experts whose output is averaged with the others' are refused.
"""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    PARALLEL,
    SILU,
    body_keys,
    heads,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import DEEPSEEK_SHARED
from megaconv.families.parts.experts import QWEN_EXPERTS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    multiplier,
    need_flag,
    need_number,
    need_size,
    require_each_layer,
    size,
)
from megaconv.families.parts.rope import rope, rope_in_one_object
from megaconv.families.parts.row_changes import in_core, with_shared_norm
from megaconv.families.parts.windows import layer_types, windowed_layers
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each, per_layer

_ALL = (EMBEDDING, *ATTENTION, *MLP, *QWEN_EXPERTS, *DEEPSEEK_SHARED, *HEAD)
ROWS = in_core(with_shared_norm(_ALL))

_CENTERED, _ROOT = "layer_norm_eps", "rms_norm_eps"


def _read_norm(raw: Raw) -> Fields:
    """An RMSNorm if its epsilon is stated, else a LayerNorm without bias."""
    if raw.get(_ROOT) is not None:
        return {"norm.kind": "RMSNorm", "norm.epsilon": need_number(raw, _ROOT, 1e-5)}
    return {"norm.kind": "LayerNorm", "norm.epsilon": need_number(raw, _CENTERED, 1e-5)}


def _write_norm(config: ModelConfig) -> Raw:
    norm = config.norm
    root = norm.epsilon if norm.kind == "RMSNorm" else None
    return {_CENTERED: norm.epsilon, _ROOT: root}


_TYPES, _WINDOW, _STEP = "layer_types", "sliding_window", "sliding_window_pattern"
_MLPS, _FIRST, _FIRST_STEP = "mlp_layer_types", "first_k_dense_replace", "prefix_dense_sliding_window_pattern"  # fmt: skip


def _usual_layers(raw: Raw, layers: int, first: int) -> list[str]:
    """The layer_types if the key is missing. first: the number of dense first layers, which have a step of their own."""
    own, step = need_size(raw, _FIRST_STEP, 1), need_size(raw, _STEP, 4)
    steps = [(layer, own) for layer in range(first)]
    steps += [(layer, step) for layer in range(layers - first)]
    return [
        "full_attention" if (place + 1) % every == 0 else "sliding_attention"
        for place, every in steps
    ]


def _read_layers(raw: Raw) -> Fields:
    layers, first = need_size(raw, "num_hidden_layers"), raw.get(_FIRST) or 0
    usual = ["dense" if layer < first else "sparse" for layer in range(layers)]
    mlps: Any = raw.get(_MLPS) or usual
    require_each_layer(_MLPS, mlps, layers)
    windowed = windowed_layers(raw, _usual_layers(raw, layers, first))
    dense_rotate = need_size(raw, _FIRST_STEP, 1) == 1
    rotates = [
        layer in windowed or (mlps[layer] == "dense" and dense_rotate) for layer in range(layers)
    ]
    experts = [layer for layer, kind in enumerate(mlps) if kind != "dense"]
    return {
        "layers.window": per_layer(windowed, layers, raw.get(_WINDOW, 4096), None),
        "layers.rotates": one_or_each(tuple(rotates)),
        "layers.mlp": per_layer(experts, layers, "experts", "dense"),
    }


def _write_layers(config: ModelConfig) -> Raw:
    still = any(
        kind.mlp == "dense" and kind.window is None and not kind.rotates for kind in config.layers
    )
    mlps = ["dense" if kind.mlp == "dense" else "sparse" for kind in config.layers]
    kinds = {_TYPES: layer_types(config), _MLPS: mlps, _WINDOW: config.window or 4096}
    return {**kinds, _FIRST_STEP: 2 if still else 1}


_WIDTH, _DENSE_WIDTH = "intermediate_size", "prefix_dense_intermediate_size"
_SHARES, _COMBINES = "num_shared_experts", "shared_expert_combination_strategy"


def _read_widths(raw: Raw) -> Fields:
    width, shares = need_size(raw, _WIDTH), raw.get(_SHARES) or 0
    combines = raw.get(_COMBINES, "average")
    if shares and combines != "sum":
        raise NotExpressible(
            f"{CONFIG_NAME}: {_COMBINES} {combines!r} is not supported with shared experts, only 'sum' is"
        )
    dense = need_size(raw, _DENSE_WIDTH, width)
    return {"mlp.ffn": dense, "experts.ffn": width, "experts.shared_ffn": width * shares}


def _write_widths(config: ModelConfig) -> Raw:
    experts = config.experts
    shares = experts.shared_ffn // max(1, experts.ffn)
    return {_WIDTH: experts.ffn, _DENSE_WIDTH: config.mlp.ffn, _SHARES: shares, _COMBINES: "sum"}


_SCORE, _SUMS = "expert_selection_fn", "norm_topk_prob"
_SCORES = choice(_SCORE, "experts.score", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")


def _read_router(raw: Raw) -> Fields:
    """A softmax is over the chosen experts, so that their weights always sum up to 1."""
    score = _SCORES.read(raw)
    sums = score["experts.score"] == "softmax" or need_flag(raw, _SUMS, True)
    return {**score, "experts.renormalize": sums}


def _write_router(config: ModelConfig) -> Raw:
    return {**_SCORES.write(config), _SUMS: config.experts.renormalize}


_ROPE = rope_in_one_object(rope(1e4))


def _read_rope(raw: Raw) -> Fields:
    """Transformers' class reads rope_parameters and no rope_scaling. Other classes take rope_scaling first."""
    if raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raise NotExpressible(
            f"{CONFIG_NAME}: rope_scaling without rope_parameters is not supported in this architecture: transformers doesn't read it; "
            "write it as rope_parameters, with rope_theta"
        )
    return _ROPE.read({**raw, "rope_scaling": None})


_BODY = body_keys(
    positions=8192,
    epsilon_key=None,
    tied=True,
    tokens=(5, 255001, 0),
    rotation=Keys(_ROPE.names, _read_rope, _ROPE.write),
)
_KEYS = (
    *(each for each in _BODY if each.names != (_WIDTH,)),
    Keys((_CENTERED, _ROOT), _read_norm, _write_norm),
    heads(None, 128),
    ATTENTION_BIASES,
    multiplier("logit_scale", "head.divisor", 0.0625),
    Keys((_TYPES, _WINDOW, _STEP, _MLPS, _FIRST, _FIRST_STEP), _read_layers, _write_layers),
    Keys((_WIDTH, _DENSE_WIDTH, _SHARES, _COMBINES), _read_widths, _write_widths),
    Keys((_SCORE, _SUMS), _read_router, _write_router),
    size("num_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
)
_FIXED = {**LLAMA_LIKE, **PARALLEL, "norm.bias": False, "positions.interleaved": True}

FAMILY = Family(
    name="cohere2_moe",
    architectures=("Cohere2MoeForCausalLM",),
    model_type="cohere2_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
