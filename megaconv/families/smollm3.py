"""SmolLM3: Llama with layers whose q and k don't rotate, usually every fourth."""

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    PLAIN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_size
from megaconv.families.parts.rope import rope, rotating_layers
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import layer_types, windowed_layers, windows_on
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer


def _read(raw: Raw) -> Fields:
    """The rotation and windows of the layers.

    no_rope_layers has a 1 for each layer that rotates. The layers that don't rotate have the windows, unless
    layer_types has another value.
    """
    layers = need_size(raw, "num_hidden_layers")
    rotates = rotating_layers(raw)
    if len(rotates) < layers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: no_rope_layers lists {counted(len(rotates), 'layer')}, the model has {layers}"
        )
    without = [layer for layer in range(layers) if not rotates[layer]]
    return {
        "layers.rotates": per_layer(without, layers, False, True),
        **_windows(raw, without, layers),
    }


def _windows(raw: Raw, without: list[int], layers: int) -> Fields:
    """The windows of the layers. without: the layers that don't rotate."""
    size = raw.get("sliding_window")
    if not size:
        return {}
    if not raw.get("use_sliding_window"):
        _require_no_windows(raw)
        return {}
    kinds = [
        "sliding_attention" if layer in without else "full_attention" for layer in range(layers)
    ]
    return windows_on(raw, windowed_layers(raw, kinds), size)


def _require_no_windows(raw: Raw) -> None:
    if "sliding_attention" in (raw.get("layer_types") or ()):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: layer_types has sliding_attention, and use_sliding_window says that no layer has a window: which of "
            "both transformers goes by depends on its attention kernel; set use_sliding_window to true, or take it out of layer_types"
        )


def _write(config: ModelConfig) -> Raw:
    return {
        "no_rope_layers": [int(kind.rotates) for kind in config.layers],
        "use_sliding_window": config.has("windows"),
        "sliding_window": config.window,
        "layer_types": layer_types(config),
    }


_LAYERS = (
    "no_rope_layers",
    "no_rope_layer_interval",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
)
_KEYS = (
    *decoder_keys(
        positions=32768, kv_heads=4, rotation=rope(2e6), tied=True, tokens=(128000, 128001, 128004)
    ),
    Keys(_LAYERS, _read, _write),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
)

FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    rows=in_core(LLAMA_ROWS),
    keys=_KEYS,
    fixed=LLAMA_LIKE,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{PLAIN.replace('!skips_rope', 'skips_rope')} !qkv_alone !qk_norm",
)
