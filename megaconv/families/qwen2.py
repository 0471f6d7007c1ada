"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v."""

from collections.abc import Callable

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.decoder_keys import (
    LLAMA_LIKE,
    PLAIN,
    SILU,
    decoder_keys,
    layer_types,
    windowed_layers,
    windows_on,
)
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.model.config import ModelConfig


def qwen_windows(every_layer: Callable[[Raw], list[str]]) -> Keys:
    """Qwen's windows count only when use_sliding_window says so; every_layer: layer_types where the key is missing.

    Layers are written one by one, which old and new transformers both follow.
    """

    def read(raw: Raw) -> Fields:
        size = raw.get("sliding_window", 4096)
        if not raw.get("use_sliding_window") or not size:
            return {}
        return windows_on(raw, windowed_layers(raw, every_layer(raw)), size)

    def write(config: ModelConfig) -> Raw:
        windowed = config.layers_with("window")
        return {
            "use_sliding_window": bool(windowed),
            "sliding_window": config.window,
            "max_window_layers": windowed[0] if windowed else config.layer_count,
            "layer_types": layer_types(config),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def _from_max_window_layers(raw: Raw) -> list[str]:
    layers, first = need_size(raw, "num_hidden_layers"), raw.get("max_window_layers", 28) or 0
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


QWEN_WINDOWS = qwen_windows(_from_max_window_layers)

FAMILY = Family(
    "qwen2", ("Qwen2ForCausalLM",), "qwen2", ROWS,
    keys=(*decoder_keys(positions=32768, kv_heads=32), QWEN_WINDOWS),
    fixed=LLAMA_LIKE | {"attention.qkv_bias": True}, only=SILU, ignored=IGNORED, features=("qkv_bias",),
    recognized=f"{PLAIN} qkv_alone !qk_norm",
)  # fmt: skip
