"""Pebble: Llama's layers and configuration, under other names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_NAMES = {"model.embed_tokens": "body.embed", "model.layers.": "body.blocks.", "model.norm": "body.last_norm"}
_REFUSED = {
    "qkv_bias": "biases on q, k, v",
    "o_bias": "a bias on the output",
    "mlp_bias": "MLP biases",
    "qk_norm": "q and k norms",
    "sliding_window": "a sliding window",
}


def _renamed(row: Row) -> Row:
    """Only Hugging Face's names differ. Meta's files and Megatron's legacy models have no words for a Pebble."""
    name = str(row.hf)
    for llama, pebble in _NAMES.items():
        name = name.replace(llama, pebble)
    return replace(row, hf=name, legacy=None, meta=None)


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    return read_decoder(raw, "pebble", {"max_position_embeddings": 2048})


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(config, "PebbleForCausalLM", **_REFUSED)
    return write_decoder(config, "PebbleForCausalLM", "pebble")


ROWS = tuple(_renamed(row) for row in LLAMA_ROWS)
FAMILY = Family("pebble", ("PebbleForCausalLM",), "pebble", ROWS, read_hf, write_hf)
