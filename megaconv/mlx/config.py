"""The config.json of an MLX model: keys that mlx-lm requires, and models that its classes can't describe.

Source: the `ModelArgs` of mlx-lm 0.32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig

_ROPE_IN_ONE_PLACE = ("glm_moe_dsa", "ministral3", "mistral4")
"""Families for which mlx-lm reads the rope from rope_parameters alone."""
_WITHOUT_HEAD_DIM = (
    *("apertus", "cohere2", "granite", "granite_moe", "helium", "internlm2", "internlm3", "lfm2", "lfm2_moe", "mimo", "mixtral"),
    *("phi3", "phimoe", "qwen2", "qwen2_moe", "starcoder2"),
)  # fmt: skip
"""Families for which mlx-lm computes the size of a head from hidden and heads."""


def completed(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json as mlx-lm requires them. raw: the keys of transformers.

    Raises NotExpressible for a model that mlx-lm's class can't describe.
    """
    found = dict(raw)
    _require_head_dim(raw, config.family)
    if config.family in _ROPE_IN_ONE_PLACE:
        # A config.json of transformers 5 has its rope in another place than mlx-lm looks for it.
        scaling = raw.get("rope_scaling") or {"rope_type": "default"}
        found.setdefault("rope_parameters", {"rope_theta": raw["rope_theta"], **scaling})
    complete = _COMPLETE.get(config.family)
    if complete is not None:
        complete(found, config)
    return found


def _require_head_dim(raw: Mapping[str, Any], family: str) -> None:
    size = raw.get("head_dim")
    if family not in _WITHOUT_HEAD_DIM or size is None:
        return
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if size * heads != hidden:
        raise NotExpressible(
            f"--saver mlx: {heads} heads of {size} with a hidden size of {hidden}: mlx-lm's class of {family} has no head_dim; "
            "choose another --saver, or give the model's own directory as --config if it is of another family"
        )


def _step(layers: tuple[int, ...], kind: str, config: ModelConfig) -> int:
    """The distance of layers that are the last of each so many. Raises NotExpressible for other layers."""
    step = layers[0] + 1 if layers else config.layer_count + 1
    if layers != tuple(range(step - 1, config.layer_count, step)):
        raise NotExpressible(
            f"--saver mlx: layers {', '.join(map(str, layers))} have {kind}; mlx-lm's class of {config.family} has them at equal "
            "distances. Choose another --saver"
        )
    return step


def _step_of_needed(layers: tuple[int, ...], kind: str, config: ModelConfig) -> int:
    """The same distance. Raises NotExpressible for a model without such a layer too."""
    if not layers:
        raise NotExpressible(
            f"--saver mlx: no layer has {kind}; mlx-lm's class of {config.family} needs one. Choose another --saver"
        )
    return _step(layers, kind, config)


def _windows(found: dict[str, Any], config: ModelConfig) -> None:
    """The last layer of each `sliding_window_pattern` layers has no window."""
    plain = tuple(number for number, layer in enumerate(config.layers) if layer.window is None)
    found["sliding_window_pattern"] = _step_of_needed(plain, "no window", config)


def _delta_nets(found: dict[str, Any], config: ModelConfig) -> None:
    """The last layer of each `full_attention_interval` layers has attention, and the others have delta nets."""
    kinds = enumerate(layer.mixer for layer in config.layers)
    with_attention = tuple(number for number, kind in kinds if kind != "linear")
    found["full_attention_interval"] = _step_of_needed(with_attention, "attention", config)


def _apertus(found: dict[str, Any], config: ModelConfig) -> None:
    found.setdefault("mlp_bias", config.mlp.bias)
    found.setdefault("post_norm", False)
    found.setdefault("qk_norm", True)


def _dbrx(found: dict[str, Any], config: ModelConfig) -> None:
    attention = config.attention
    if attention.clip is None or not config.experts.renormalize:
        raise NotExpressible(
            "--saver mlx: mlx-lm's class of dbrx always limits q, k and v, and normalizes the weights of experts; this model lacks one of "
            "them; choose another --saver"
        )
    own = {"clip_qkv": attention.clip, "kv_n_heads": attention.kv_heads}
    found["attn_config"] = {
        **(found.get("attn_config") or {}),
        **own,
        "rope_theta": config.positions.theta,
    }


def _exaone4(found: dict[str, Any], _: ModelConfig) -> None:
    """A letter for each layer: L for a local one, G for a global one."""
    if isinstance(found.get("sliding_window_pattern"), str):
        return
    kinds = found.get("layer_types") or []
    letters = "".join("L" if kind == "sliding_attention" else "G" for kind in kinds)
    found["sliding_window_pattern"] = letters if "L" in letters else None


def _exaone_moe(found: dict[str, Any], config: ModelConfig) -> None:
    with_experts = config.layers_with("moe")
    found["is_moe_layer"] = [layer in with_experts for layer in range(config.layer_count)]


_MIXERS_OF_GRANITE = {"linear_attention": "mamba", "full_attention": "attention"}
"""Words of transformers 5 -> mlx-lm's."""


def _granite_moe_hybrid(found: dict[str, Any], config: ModelConfig) -> None:
    given = found["layer_types"]
    found["layer_types"] = [_MIXERS_OF_GRANITE.get(kind, kind) for kind in given]
    found["position_embedding_type"] = "rope" if config.positions.kind == "rope" else "nope"
    if not config.layers_with("moe"):  # mlx-lm looks for the width of a dense MLP here
        found["intermediate_size"] = found["shared_intermediate_size"]


def _hunyuan_v1_dense(found: dict[str, Any], _: ModelConfig) -> None:
    scaling = found.get("rope_scaling")
    if scaling:
        found["rope_scaling"] = {"type": scaling.get("rope_type"), **scaling}


def _lfm2(found: dict[str, Any], config: ModelConfig) -> None:
    """The width of the MLPs as it is. From other keys, mlx-lm and transformers compute it."""
    if "block_dim" in found:
        return
    width = config.mlp.ffn
    found |= {"block_dim": config.hidden, "block_ff_dim": width, "intermediate_size": width}
    found["block_auto_adjust_ff_dim"] = False
    found.setdefault("block_multiple_of", 256)
    found.setdefault("block_ffn_dim_multiplier", 1.0)


def _llama4(found: dict[str, Any], config: ModelConfig) -> None:
    """The last layer of each `interleave_moe_layer_step` layers has experts."""
    with_experts = config.layers_with("moe")
    found["interleave_moe_layer_step"] = _step(with_experts, "experts", config)


def _longcat_flash(found: dict[str, Any], config: ModelConfig) -> None:
    if config.has("stored_idle"):
        raise NotExpressible(
            "--saver mlx: the files hold matrices of experts that compute nothing, which mlx-lm refuses; give the published files, which "
            "have none"
        )
    found.setdefault("rope_theta", config.positions.theta)
    for key in ("mla_scale_kv_lora", "mla_scale_q_lora"):
        found.setdefault(key, True)
    found.setdefault("attention_method", "MLA")
    found.setdefault("zero_expert_type", "identity")


def _mamba2(found: dict[str, Any], _: ModelConfig) -> None:
    found.setdefault("intermediate_size", found["num_heads"] * found["head_dim"])
    found.setdefault("time_step_limit", [0.0, math.inf])
    found.setdefault("time_step_rank", "auto")


def _minimax_m2(found: dict[str, Any], _: ModelConfig) -> None:
    found.setdefault("shared_intermediate_size", 0)


def _solar_open(found: dict[str, Any], config: ModelConfig) -> None:
    with_experts = config.layers_with("moe")
    first = with_experts[0] if with_experts else config.layer_count
    found.setdefault("first_k_dense_replace", first)


_COMPLETE: Mapping[str, Callable[[dict[str, Any], ModelConfig], None]] = {
    "apertus": _apertus,
    "cohere2": _windows,
    "dbrx": _dbrx,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma3_text": _windows,
    "granite_moe_hybrid": _granite_moe_hybrid,
    "hunyuan_v1_dense": _hunyuan_v1_dense,
    "lfm2": _lfm2,
    "llama4": _llama4,
    "longcat_flash": _longcat_flash,
    "mamba2": _mamba2,
    "minimax_m2": _minimax_m2,
    "qwen3_5": _delta_nets,
    "qwen3_5_moe": _delta_nets,
    "qwen3_next": _delta_nets,
    "solar_open": _solar_open,
}
