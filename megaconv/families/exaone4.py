"""EXAONE 4: Llama with norms after its sublayers instead of before them, and norms of q and k; where some layers have a window,
the others don't rotate. Megatron core has no modules for norms after sublayers; Megatron-Bridge's EXAONE 4 has.
"""

from typing import Any

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys, layer_types, windows_by_layer
from megaconv.families.parts.decoder_rows import in_core
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.families.parts.norm_places import norms_at
from megaconv.model.config import ModelConfig

_LAYER = norms_at(ATTENTION, MLP, before=None, after=("post_attention_layernorm", "post_feedforward_layernorm"))
ROWS = in_core((EMBEDDING, *_LAYER, *HEAD))

_PATTERN = "sliding_window_pattern"
_WINDOWS = windows_by_layer(4096, full_every=4, pattern=(_PATTERN,))


def _read_layers(raw: Raw) -> Fields:
    """sliding_window_pattern may be letters of layers, which repeat; the last layer then is a G whatever they say."""
    said, letters, layers = dict(raw), raw.get(_PATTERN), need_size(raw, "num_hidden_layers")
    if isinstance(letters, str) and letters and not letters.strip("LG"):
        del said[_PATTERN]
        kinds = [
            ("full" if letters[at % len(letters)] == "G" else "sliding") + "_attention" for at in range(layers - 1)
        ]
        said["layer_types"] = raw.get("layer_types") or [*kinds, "full_attention"]
    if not said.get("sliding_window", 4096):
        return {"layers.window": None, "layers.rotates": True}
    windows: Any = _WINDOWS.read(said)["layers.window"]
    each = windows if isinstance(windows, tuple) else (windows,) * layers
    return {"layers.window": windows, "layers.rotates": tuple(window is not None for window in each)}


def _write_layers(config: ModelConfig) -> Raw:
    without = 4096 if config.has("skips_rope") else None  # any size says that the layers without a window don't rotate
    return {"sliding_window": config.window or without, "layer_types": layer_types(config)}


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32, epsilon=1e-5, tokens=(0, 2, None)),
    Keys(_WINDOWS.names, _read_layers, _write_layers),
)
_PLAIN = PLAIN.replace(" !skips_rope", "").replace("pre_norm", "output_norm")

FAMILY = Family(
    "exaone4", ("Exaone4ForCausalLM",), "exaone4", ROWS, keys=_KEYS, only=SILU, ignored=IGNORED,
    fixed={**LLAMA_LIKE, "attention.qk_norm": True, "norm.place": "after"},
    features=("qk_norm",), recognized=f"{_PLAIN} qk_norm !wide_qk_norm",
    proven="custom module",
)  # fmt: skip
