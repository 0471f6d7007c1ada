"""Phi-3 and 3.5 (mini, medium): Llama's tensors, with q, k, v in one and gate, up in another as Hugging Face ships them."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.hf_config import read_decoder, refuse, write_decoder
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_FUSED = {
    "layers.{l}.attn.{q|k|v}.weight": Fused("model.layers.{l}.self_attn.qkv_proj.weight"),
    "layers.{l}.mlp.{gate|up}.weight": Fused("model.layers.{l}.mlp.gate_up_proj.weight"),
}
ROWS = tuple(row.renamed(hf=_FUSED.get(row.canonical, row.names["hf"])).without("legacy", "meta") for row in LLAMA_ROWS)

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
}


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    return read_decoder(raw, "phi3", _DEFAULTS, sliding_window=raw.get("sliding_window"))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(config, "Phi3ForCausalLM", qkv_bias="attention biases", o_bias="attention biases", mlp_bias="MLP biases")
    refuse(config, "Phi3ForCausalLM", qk_norm="q and k norms", windowed_layers="a sliding window on some layers only")
    refuse(config, "Phi3ForCausalLM", rope_scaling="rope scaling, of which it knows only a kind of its own,")
    window = {"sliding_window": config.sliding_window, "original_max_position_embeddings": config.max_positions}
    return write_decoder(config, "Phi3ForCausalLM", "phi3", **window)


FAMILY = Family("phi3", ("Phi3ForCausalLM",), "phi3", ROWS, read_hf, write_hf, IGNORED)
