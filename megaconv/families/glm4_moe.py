"""GLM 4.5 and later: grouped-query attention, dense first layers, then experts routed as DeepSeek's are."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM, shared_expert_rows
from megaconv.families.parts.hf_config import read_decoder, refuse, rotary_percent, write_decoder
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.qwen2_moe import QWEN_EXPERTS
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

ROUTER_BIAS = Row(
    "layers.{l}.mlp.router.bias", ("experts",), when="moe router_bias",
    hf="model.layers.{l}.mlp.gate.e_score_correction_bias",
    core="decoder.layers.{l}.mlp.router.expert_bias",
)  # fmt: skip
SHARED = shared_expert_rows("mlp.shared_experts.{gate_proj|up_proj}.weight", "mlp.shared_experts.down_proj.weight")
ROWS = with_mtp((EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *SHARED, *HEAD))

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_EXPERT_DEFAULTS = {
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}


def deepseek_experts(raw: Mapping[str, Any], dense_layers: int) -> dict[str, Any]:
    """Routed and shared experts in DeepSeek's words; dense_layers: where the configuration doesn't say."""
    dense = raw.get("first_k_dense_replace", dense_layers)
    return {
        "experts": raw["n_routed_experts"],
        "experts_per_token": raw.get("num_experts_per_tok", 8),
        "moe_ffn": raw["moe_intermediate_size"],
        "moe_layers": tuple(range(dense, raw["num_hidden_layers"])) if dense else None,
        "shared_ffn": (raw.get("n_shared_experts") or 0) * raw["moe_intermediate_size"],
        "router_score": "sigmoid",
        "router_scale": raw.get("routed_scaling_factor", 1.0),
        "router_groups": raw.get("n_group"),
        "router_group_topk": raw.get("topk_group"),
        "router_bias": True,
        "renormalize": bool(raw.get("norm_topk_prob", True)),
    }


def deepseek_expert_words(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The way back. Raises NotExpressible for experts that don't fit these words."""
    first = 0 if config.moe_layers is None else min(config.moe_layers, default=config.layers)
    shared, rest = divmod(config.shared_ffn, config.moe_ffn)
    if rest or config.moe_layers not in (None, tuple(range(first, config.layers))):
        what = f"a shared expert of width {config.shared_ffn}" if rest else "dense layers between layers with experts"
        raise NotExpressible(f"the model has {what}, for which {architecture} has no place in its config.json")
    return {
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_ffn,
        "first_k_dense_replace": first,
        "n_shared_experts": shared,
        "routed_scaling_factor": config.router_scale or 1.0,
        "n_group": config.router_groups or 1,
        "topk_group": config.router_group_topk or 1,
        "norm_topk_prob": config.renormalize,
    }


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias"))
    attention = {"qkv_bias": bias, "qk_norm": bool(raw.get("use_qk_norm")), "rotary_percent": rotary_percent(raw, 0.5)}
    experts = deepseek_experts({**_EXPERT_DEFAULTS, **raw}, 1)
    mtp = raw.get("num_nextn_predict_layers") or 0
    return read_decoder(raw, "glm4_moe", _DEFAULTS, **attention, **experts, mtp_layers=mtp)


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config,
        "Glm4MoeForCausalLM",
        o_bias="a bias on the attention output",
        mlp_bias="MLP biases",
        shared_gate="a gated shared expert",
    )
    refuse(config, "Glm4MoeForCausalLM", sliding_window="a sliding window")
    attention = {
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": config.rotary_percent,
        "num_nextn_predict_layers": config.mtp_layers,
    }
    words = deepseek_expert_words(config, "Glm4MoeForCausalLM") | attention
    return write_decoder(config, "Glm4MoeForCausalLM", "glm4_moe", **words)


FAMILY = Family(
    "glm4_moe", ("Glm4MoeForCausalLM",), "glm4_moe", ROWS, read_hf, write_hf, IGNORED, complete=without_missing
)
