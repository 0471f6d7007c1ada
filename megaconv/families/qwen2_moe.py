"""Qwen 1.5 and 2 MoE: Qwen 2's attention, routed experts, and a gated shared expert."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM, expert_rows, shared_expert_rows
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.families.qwen2 import qwen_window, qwen_window_words
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

QWEN_EXPERTS = expert_rows(
    "mlp.gate.weight", "mlp.experts.{e}.{gate_proj|up_proj}.weight", "mlp.experts.{e}.down_proj.weight"
)
_SHARED = shared_expert_rows("mlp.shared_expert.{gate_proj|up_proj}.weight", "mlp.shared_expert.down_proj.weight")
_SHARED_GATE = Row(
    "layers.{l}.mlp.shared_gate.weight", ("1 hidden",), when="moe shared_gate",
    hf="model.layers.{l}.mlp.shared_expert_gate.weight",
    core="decoder.layers.{l}.mlp.shared_experts.gate_weight",
)  # fmt: skip
ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *_SHARED, _SHARED_GATE, *HEAD)

_DEFAULTS = {"num_key_value_heads": 16, "max_position_embeddings": 32768}


def qwen_experts(raw: Mapping[str, Any], experts: int, experts_per_token: int, moe_ffn: int) -> dict[str, Any]:
    """Routed experts in Qwen's words; the numbers count where the configuration doesn't say."""
    layers, step, dense = raw["num_hidden_layers"], raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    with_experts = tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return {
        "experts": raw.get("num_experts") or raw.get("num_local_experts") or experts,
        "experts_per_token": raw.get("num_experts_per_tok", experts_per_token),
        "moe_ffn": raw.get("moe_intermediate_size", moe_ffn),
        "moe_layers": None if len(with_experts) == layers else with_experts,
        "renormalize": bool(raw.get("norm_topk_prob", False)),
    }


def qwen_expert_words(config: ModelConfig) -> dict[str, Any]:
    """The way back."""
    dense = [layer for layer in range(config.layers) if config.has("dense", layer)]
    return {
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "norm_topk_prob": config.renormalize,
    }


def _window(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Unlike Qwen 2: unless layers are listed, every other one has a window, and only before max_window_layers."""
    layers, end = raw["num_hidden_layers"], raw.get("max_window_layers", 28)
    kinds = ["full_attention" if layer % 2 or layer >= end else "sliding_attention" for layer in range(layers)]
    return qwen_window({**raw, "layer_types": raw.get("layer_types") or kinds})


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    shared = {"shared_ffn": raw.get("shared_expert_intermediate_size", 5632), "shared_gate": True}
    bias = bool(raw.get("qkv_bias", True))
    experts = qwen_experts(raw, 60, experts_per_token=4, moe_ffn=1408)
    return read_decoder(raw, "qwen2_moe", _DEFAULTS, qkv_bias=bias, **experts, **shared, **_window(raw))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config,
        "Qwen2MoeForCausalLM",
        o_bias="a bias on the attention output",
        qk_norm="q and k norms",
        router_bias="a router bias",
    )
    refuse(config, "Qwen2MoeForCausalLM", router_scale="a router scale", mlp_bias="MLP biases")
    shared = {"shared_expert_intermediate_size": config.shared_ffn, "qkv_bias": config.qkv_bias}
    words = qwen_expert_words(config) | shared | qwen_window_words(config)
    return write_decoder(config, "Qwen2MoeForCausalLM", "qwen2_moe", **words)


FAMILY = Family(
    "qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2_moe", ROWS, read_hf, write_hf, IGNORED, features=("qkv_bias",)
)
