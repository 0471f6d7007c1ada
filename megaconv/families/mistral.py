"""Mistral: Llama's tensors, and a sliding window."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.model.config import ModelConfig

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2}


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    return read_decoder(raw, "mistral", _DEFAULTS, sliding_window=raw.get("sliding_window", 4096))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config,
        "MistralForCausalLM",
        qkv_bias="attention biases",
        o_bias="attention biases",
        mlp_bias="MLP biases",
        qk_norm="q and k norms",
    )
    refuse(config, "MistralForCausalLM", windowed_layers="a sliding window on some layers only")
    return write_decoder(config, "MistralForCausalLM", "mistral", sliding_window=config.sliding_window)


FAMILY = Family("mistral", ("MistralForCausalLM",), "mistral", ROWS, read_hf, write_hf, IGNORED)
