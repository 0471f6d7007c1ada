"""Qwen 3 MoE: Qwen 3's attention, and routed experts without a shared one."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.families.qwen2_moe import QWEN_EXPERTS, qwen_expert_words, qwen_experts
from megaconv.model.config import ModelConfig

ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *HEAD)

_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias"))
    window = {"sliding_window": raw.get("sliding_window", 4096)} if raw.get("use_sliding_window") else {}
    experts = qwen_experts(raw, 128, experts_per_token=8, moe_ffn=768)
    attention = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}
    return read_decoder(raw, "qwen3_moe", _DEFAULTS, **attention, **experts, **window)


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config,
        "Qwen3MoeForCausalLM",
        shared_ffn="a shared expert",
        router_bias="a router bias",
        router_scale="a router scale",
    )
    refuse(config, "Qwen3MoeForCausalLM", mlp_bias="MLP biases", windowed_layers="a sliding window on some layers only")
    if config.qkv_bias != config.o_bias:
        refuse(
            config,
            "Qwen3MoeForCausalLM",
            qkv_bias="biases on q, k, v but not on the output",
            o_bias="a bias on the output only",
        )
    window = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    words = qwen_expert_words(config) | window | {"attention_bias": config.qkv_bias}
    return write_decoder(config, "Qwen3MoeForCausalLM", "qwen3_moe", **words)


FAMILY = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3_moe", ROWS, read_hf, write_hf, IGNORED, features=("qk_norm",)
)
