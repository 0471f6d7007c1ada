"""Qwen 3: norms on q and k, a head_dim of its own."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.families.qwen2 import qwen_window, qwen_window_words
from megaconv.model.config import ModelConfig

_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias"))
    return read_decoder(raw, "qwen3", _DEFAULTS, qkv_bias=bias, o_bias=bias, qk_norm=True, **qwen_window(raw))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(config, "Qwen3ForCausalLM", mlp_bias="MLP biases")
    if config.qkv_bias != config.o_bias:
        refuse(
            config,
            "Qwen3ForCausalLM",
            qkv_bias="biases on q, k, v but not on the output",
            o_bias="a bias on the output only",
        )
    return write_decoder(
        config, "Qwen3ForCausalLM", "qwen3", attention_bias=config.qkv_bias, **qwen_window_words(config)
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), "qwen3", ROWS, read_hf, write_hf, IGNORED, features=("qk_norm",))
