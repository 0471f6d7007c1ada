"""GPT-Neo: learned positions, windows on every other layer, scores that aren't divided by the root of the head size."""

from typing import Any

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import GELUS, LEARNED_POSITIONS, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.row_changes import (
    in_core,
    with_modules,
    with_norm_biases,
    with_positions,
    without_gate,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.h.{l}",
    "input_layernorm": "ln_1",
    "self_attn.": "attn.attention.",
    "o_proj": "out_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "model.norm": "transformer.ln_f",
}
_LAYERS = with_modules(with_norm_biases(without_gate(LLAMA_ROWS)), _MODULES)
ROWS = in_core(with_positions(_LAYERS, "transformer.wpe"))

_TYPES, _LIST, _WINDOW, _WIDTH = "attention_types", "attention_layers", "window_size", "intermediate_size"  # fmt: skip
_USUAL_WINDOW = 256


def _read_windows(raw: Raw) -> Fields:
    """The windows of `local` layers. attention_types has groups of layers, each with the number of its repetitions."""
    groups: Any = raw.get(_TYPES) or [[["global", "local"], 12]]
    layers = need_size(raw, "num_layers")
    for _, times in groups:
        if type(times) is not int or times > layers:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {_TYPES} should repeat a group at most {counted(layers, 'time')}, found {times!r:.60}"
            )
    kinds = [kind for names, times in groups for _ in range(times) for kind in names]
    require_each_layer(_TYPES, kinds, layers)
    unknown = set(kinds) - {"global", "local"}
    if unknown:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_TYPES} has {unknown.pop()!r}; expected global or local"
        )
    if raw.get(_LIST, kinds) != kinds:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_LIST} contradicts {_TYPES}, from which it follows; leave {_LIST} out (transformers takes it)"
        )
    window = need_size(raw, _WINDOW, _USUAL_WINDOW)
    each = tuple(window if kind == "local" else None for kind in kinds)
    return {"layers.window": one_or_each(each)}


def _write_windows(config: ModelConfig) -> Raw:
    kinds = ["global" if kind.window is None else "local" for kind in config.layers]
    window = config.window or _USUAL_WINDOW
    return {_TYPES: [[kinds, 1]], _LIST: kinds, _WINDOW: window}


def _read_width(raw: Raw) -> Fields:
    return {"mlp.ffn": raw.get(_WIDTH) or 4 * need_size(raw, "hidden_size")}


_KEYS = (
    size("hidden_size", "hidden"),
    size("num_layers", "layers.count"),
    size("max_position_embeddings", "max_positions", 2048),
    multi_head("num_heads", "hidden_size"),
    Keys((_TYPES, _LIST, _WINDOW), _read_windows, _write_windows),
    Keys((_WIDTH,), _read_width, lambda config: {_WIDTH: config.mlp.ffn}),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    choice("activation_function", "mlp.activation", GELUS, "gelu_new"),
    *model_keys(tied=True, tokens=(50256, 50256, None)),
)
_FIXED = {**LEARNED_POSITIONS, "attention.o_bias": True, "mlp.bias": True, "attention.scale": 1.0}
_ALIASES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_MASKS = (r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",)
"""Older files store the causal mask."""

FAMILY = Family(
    name="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    model_type="gpt_neo",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    aliases=_ALIASES,
    ignored=_MASKS,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
