"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.hf_config import layer_types, read_decoder, refuse, windowed_layers, write_decoder
from megaconv.model.config import ModelConfig

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}


def qwen_window(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's sliding window counts only when use_sliding_window says so, and only from max_window_layers on."""
    layers = windowed_layers({"max_window_layers": 28, **raw})
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window") or window is None or layers == ():
        return {}
    return {"sliding_window": window, "windowed_layers": layers}


def qwen_window_words(config: ModelConfig) -> dict[str, Any]:
    """The way back; layers are named one by one, which old and new transformers both follow."""
    first = 0 if config.windowed_layers is None else min(config.windowed_layers, default=config.layers)
    words: dict[str, Any] = {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
    }
    return words | {
        "max_window_layers": first if config.sliding_window else config.layers,
        "layer_types": layer_types(config),
    }


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    return read_decoder(raw, "qwen2", _DEFAULTS, qkv_bias=True, **qwen_window(raw))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(
        config,
        "Qwen2ForCausalLM",
        o_bias="a bias on the attention output",
        mlp_bias="MLP biases",
        qk_norm="q and k norms",
    )
    return write_decoder(config, "Qwen2ForCausalLM", "qwen2", **qwen_window_words(config))


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), "qwen2", ROWS, read_hf, write_hf, IGNORED, features=("qkv_bias",))
