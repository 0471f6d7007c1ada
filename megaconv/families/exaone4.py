"""EXAONE 4: Llama with norms after its sublayers instead of before them, and norms of q and k.

If some layers have a window, the other layers don't rotate. Megatron core has no modules for norms after sublayers;
Megatron-Bridge's EXAONE 4 has them.
"""

from typing import Any

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import layer_types, windows_by_layer
from megaconv.model.config import ModelConfig

_LAYER = norms_at(
    ATTENTION, MLP, before=None, after=("post_attention_layernorm", "post_feedforward_layernorm")
)
ROWS = in_core((EMBEDDING, *_LAYER, *HEAD))

_PATTERN = "sliding_window_pattern"
_TYPES = {"L": "sliding_attention", "G": "full_attention"}
"""Letter of a layer -> its layer type."""
_WINDOWS = windows_by_layer(4096, full_every=4, pattern=(_PATTERN,))


def _read_layers(raw: Raw) -> Fields:
    """The windows and rotation of the layers.

    sliding_window_pattern may be a repeating string of layer letters. The last layer is then a G, whatever the string
    says.
    """
    layers = need_size(raw, "num_hidden_layers")
    if not raw.get("sliding_window", 4096):
        return {"layers.window": None, "layers.rotates": True}
    windows: Any = _WINDOWS.read(_without_letters(raw, layers))["layers.window"]
    each = windows if isinstance(windows, tuple) else (windows,) * layers
    return {
        "layers.window": windows,
        "layers.rotates": tuple(window is not None for window in each),
    }


def _without_letters(raw: Raw, layers: int) -> Raw:
    """The keys with layer_types in place of layer letters."""
    letters = raw.get(_PATTERN)
    if not isinstance(letters, str) or not letters or letters.strip("LG"):
        return raw
    repeated = [letters[layer % len(letters)] for layer in range(layers - 1)]
    types = [_TYPES[letter] for letter in (*repeated, "G")]
    others = {key: value for key, value in raw.items() if key != _PATTERN}
    return {**others, "layer_types": raw.get("layer_types") or types}


def _write_layers(config: ModelConfig) -> Raw:
    # Any size says that the layers without a window don't rotate.
    without = 4096 if config.has("skips_rope") else None
    return {"sliding_window": config.window or without, "layer_types": layer_types(config)}


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32, epsilon=1e-5, tokens=(0, 2, None)),
    Keys(_WINDOWS.names, _read_layers, _write_layers),
)
_PLAIN = PLAIN.replace(" !skips_rope", "").replace("pre_norm", "output_norm")

FAMILY = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    model_type="exaone4",
    rows=ROWS,
    keys=_KEYS,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    fixed={**LLAMA_LIKE, "attention.qk_norm": True, "norm.place": "after"},
    features=("qk_norm",),
    recognized=f"{_PLAIN} qk_norm !wide_qk_norm",
    proven="custom module",
)
