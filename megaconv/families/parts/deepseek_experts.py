"""Experts as DeepSeek and GLM have them: router bias, shared experts, dense layers between, and the keys of config.json.

    hf     model.layers.{l}.mlp.{gate, gate.e_score_correction_bias, experts.{e}, shared_experts}
    core   decoder.layers.{l}.mlp.{router, router.expert_bias, experts, shared_experts}

The numbers in each function are the defaults of an architecture's configuration class, for missing keys. Routed experts
have Qwen's names (experts.py).
"""

from collections.abc import Sequence
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, shared_expert_rows
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_size,
    require_each_layer,
    size,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Row

ROUTER_BIAS = Row(
    "layers.{l}.mlp.router.bias", ("experts",), when="moe router_bias",
    hf="model.layers.{l}.mlp.gate.e_score_correction_bias",
    core="decoder.layers.{l}.mlp.router.expert_bias",
)  # fmt: skip
DEEPSEEK_SHARED = shared_expert_rows(
    "mlp.shared_experts.{gate_proj|up_proj}.weight", "mlp.shared_experts.down_proj.weight"
)
DEEPSEEK_MLPS = (MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *DEEPSEEK_SHARED)
"""The MLPs of dense layers, and the experts of all other layers."""
MIXTURE_ROWS = (EMBEDDING, *ATTENTION, *DEEPSEEK_MLPS, *HEAD)
"""The whole table of GLM-4.5, which has Llama's attention. It lacks layers for multi-token prediction (MTP)."""

SIGMOID_ROUTER: Fields = {"experts.score": "sigmoid", "experts.router_bias": True}
"""Fields of a router with sigmoid scores and a bias."""


def routed_experts(
    *,
    count: int | None,
    per_token: int | None = 8,
    width: int,
    count_key: str = "n_routed_experts",
    per_token_key: str = "num_experts_per_tok",
) -> tuple[Keys, ...]:
    """The keys of routed experts. count, per_token: None if the key is required."""
    return (
        size(count_key, "experts.count", count),
        size(per_token_key, "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.ffn", width),
    )


def shared_experts(*, count: int, width: int, key: str = "n_shared_experts") -> Keys:
    """The key of shared experts. The model has one shared expert that is this many times as wide as a routed one.

    width: width of a routed expert.
    """

    def read(raw: Raw) -> Fields:
        experts = raw.get(key, count) or 0
        return {"experts.shared_ffn": experts * need_size(raw, "moe_intermediate_size", width)}

    return Keys(
        (key,), read, lambda config: {key: config.experts.shared_ffn // max(1, config.experts.ffn)}
    )


def first_dense(
    dense: int, key: str = "first_k_dense_replace", *, layers: int | None = None
) -> Keys:
    """The key that counts the dense first layers. All other layers have experts.

    dense: their number if the key is missing. layers: the number of layers if config.json has none; None if it must have one.
    """

    def read(raw: Raw) -> Fields:
        first, count = raw.get(key, dense), need_size(raw, "num_hidden_layers", layers)
        return {"layers.mlp": per_layer(range(first, count), count, "experts", "dense")}

    return Keys((key,), read, lambda config: {key: _first_with_experts(config)})


def _first_with_experts(config: ModelConfig) -> int:
    """The first layer with experts; the number of layers if none has them."""
    return min(config.layers_with("moe"), default=config.layer_count)


def mlp_layer_types(*, dense: int, older: str | None = None) -> Keys:
    """mlp_layer_types: a word for each layer, `dense` or `sparse`. older: the key that counts the dense first layers if
    mlp_layer_types is missing."""
    names = ("mlp_layer_types",) if older is None else ("mlp_layer_types", older)

    def read(raw: Raw) -> Fields:
        layers = need_size(raw, "num_hidden_layers")
        first = dense if older is None else raw.get(older, dense)
        words = raw.get("mlp_layer_types") or _dense_first(first, layers)
        _require_known(words)
        require_each_layer("mlp_layer_types", words, layers)
        sparse = [layer for layer, word in enumerate(words) if word == "sparse"]
        return {"layers.mlp": per_layer(sparse, layers, "experts", "dense")}

    def write(config: ModelConfig) -> Raw:
        written: dict[str, Any] = {"mlp_layer_types": _words_of_layers(config)}
        if older is not None:
            written[older] = _first_with_experts(config)
        return written

    return Keys(names, read, write)


def _dense_first(dense: int, layers: int) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def _words_of_layers(config: ModelConfig) -> list[str]:
    return [
        "sparse" if config.has("moe", layer) else "dense" for layer in range(config.layer_count)
    ]


def _require_known(words: Sequence[Any]) -> None:
    for word in words:
        if word not in ("dense", "sparse"):
            raise NotExpressible(f"{CONFIG_NAME}: mlp_layer_types has {word!r}, which is not known")


def sigmoid_routing(
    *,
    scale: float,
    groups: int,
    group_topk: int,
    renormalize: bool = True,
    groups_key: str = "n_group",
    renormalize_key: str = "norm_topk_prob",
) -> tuple[Keys, ...]:
    """The keys of DeepSeek-V3's expert selection."""

    def read(raw: Raw) -> Fields:
        given = {groups_key: groups, "topk_group": group_topk, **raw}
        return {
            "experts.groups": _size_or_none(given, groups_key),
            "experts.group_topk": _size_or_none(given, "topk_group"),
            "experts.scale": raw.get("routed_scaling_factor", scale),
        }

    def write(config: ModelConfig) -> Raw:
        return {
            groups_key: config.experts.groups or 1,
            "topk_group": config.experts.group_topk or 1,
            "routed_scaling_factor": config.experts.scale or 1.0,
        }

    return (
        Keys((groups_key, "topk_group", "routed_scaling_factor"), read, write),
        flags(renormalize_key, ("experts.renormalize",), default=renormalize),
    )


def _size_or_none(raw: Raw, key: str) -> int | None:
    return None if raw[key] is None else need_size(raw, key)
