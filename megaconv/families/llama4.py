"""Llama 4, text only: one routed expert per token, whose input the router scales, and a shared expert. Some layers
don't rotate.

If `use_qk_norm` is true (Scout), q and k of rotating layers are divided by the root mean square of their elements.
`intermediate_size` is the width of an expert, and `intermediate_size_mlp` the width of a dense layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.experts import MOE_NORM, expert_rows, shared_expert_rows
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_flag,
    need_number,
    need_size,
    require_each_layer,
    size,
)
from megaconv.families.parts.rope import rope, rotating_layers
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Row, Spelling, StackedTransposed

_HF = "model.layers.{l}.feed_forward."
_GATE_UP = StackedTransposed(_HF + "experts.gate_up_proj", "experts hidden 2*moe_ffn")
_DOWN = StackedTransposed(_HF + "experts.down_proj", "experts moe_ffn hidden")
_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.{gate|up}.weight": _HF + "{gate|up}_proj.weight",
    "layers.{l}.mlp.down.weight": _HF + "down_proj.weight",
    "layers.{l}.mlp.router.weight": _HF + "router.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": _GATE_UP,
    "layers.{l}.mlp.experts.{e}.down.weight": _DOWN,
    "layers.{l}.mlp.shared.{gate|up}.weight": _HF + "shared_expert.{gate|up}_proj.weight",
    "layers.{l}.mlp.shared.down.weight": _HF + "shared_expert.down_proj.weight",
}


def _spelled(row: Row) -> Row:
    """The row with its Hugging Face name. All experts of a layer are one tensor in every file, so there is no other
    spelling."""
    name = _NAMES.get(row.canonical)
    return row if name is None else row.renamed(hf=name, hf_stacked=name)


_DENSE = (row for row in MLP if not row.canonical.endswith(".bias"))
_MIXTURE = (MOE_NORM, *_DENSE, *expert_rows("", "{|}", ""), *shared_expert_rows("{|}", ""))
ROWS = in_core((EMBEDDING, *ATTENTION, *map(_spelled, _MIXTURE), *HEAD))


def _read_widths(raw: Raw) -> Fields:
    width = need_size(raw, "intermediate_size", 8192)
    dense = need_size(raw, "intermediate_size_mlp", 16384)
    return {"mlp.ffn": dense, "experts.ffn": width, "experts.shared_ffn": width}


def _write_widths(config: ModelConfig) -> Raw:
    return {"intermediate_size": config.experts.ffn, "intermediate_size_mlp": config.mlp.ffn}


def _read_experts(raw: Raw) -> Fields:
    layers = need_size(raw, "num_hidden_layers")
    step = need_size(raw, "interleave_moe_layer_step", 1)
    chosen = raw.get("moe_layers")
    chosen = range(step - 1, layers, step) if chosen is None else chosen
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _write_experts(config: ModelConfig) -> Raw:
    return {"moe_layers": list(config.layers_with("moe")), "interleave_moe_layer_step": 1}


_ATTENDS = {True: "chunked_attention", False: "full_attention"}
"""True if a layer rotates -> its layer type."""


def _read_rotation(raw: Raw) -> Fields:
    """The layers that rotate: no_rope_layers has a 1 for each. They attend to chunks of the sequence, the others to all
    of it."""
    layers = need_size(raw, "num_hidden_layers")
    given = rotating_layers(raw)
    require_each_layer("no_rope_layers", given, layers)
    rotates = [bool(word) for word in given]
    kinds = [_ATTENDS[layer_rotates] for layer_rotates in rotates]
    if raw.get("layer_types") not in (None, kinds):
        raise NotExpressible(
            f"{CONFIG_NAME}: layer_types should have chunked_attention for the layers that rotate by no_rope_layers, "
            "full_attention for all others"
        )
    chunk = need_size(raw, "attention_chunk_size", _CHUNK)
    return {"layers.rotates": tuple(rotates), "layers.chunk": _chunks(rotates, chunk)}


def _chunks(rotates: Sequence[bool], chunk: int) -> tuple[int | None, ...]:
    """The positions of a chunk for each layer. Layers that don't rotate attend to the whole sequence."""
    return tuple(chunk if layer_rotates else None for layer_rotates in rotates)


def _write_rotation(config: ModelConfig) -> Raw:
    chunk = next((kind.chunk for kind in config.layers if kind.chunk is not None), _CHUNK)
    return {
        "attention_chunk_size": chunk,
        "no_rope_layers": [int(kind.rotates) for kind in config.layers],
        "layer_types": [_ATTENDS[kind.rotates] for kind in config.layers],
    }


_CHUNK = 8192
_SCALE = 0.1
_TEMPERATURE = ("attn_temperature_tuning", "attn_scale", "floor_scale")


def _read_temperature(raw: Raw) -> Fields:
    if not need_flag(raw, "attn_temperature_tuning", True):
        return {"temperature.scale": 0.0}
    return {
        "temperature.scale": need_number(raw, "attn_scale", _SCALE),
        "temperature.interval": need_size(raw, "floor_scale", _CHUNK),
        "temperature.offset": 1,
    }


def _write_temperature(config: ModelConfig) -> Raw:
    temperature = config.temperature
    if not temperature.scale:
        return {"attn_temperature_tuning": False}
    given = (True, temperature.scale, temperature.interval)
    return dict(zip(_TEMPERATURE, given, strict=True))


def _assumed(fields: Mapping[str, Any]) -> Fields:
    """The fields for which Megatron has no arguments, with the values of all published models."""
    rotates = fields.get("layers.rotates", True)
    layers = (rotates,) * fields["layers.count"] if isinstance(rotates, bool) else rotates
    return {"layers.chunk": _chunks(layers, _CHUNK), **_read_temperature({})}


_KEYS = (
    *decoder_keys(
        positions=131072,
        kv_heads=8,
        head_dim=128,
        ffn=8192,
        epsilon=1e-5,
        rotation=rope(5e5),
        tokens=(1, 2, None),
    ),
    Keys(("intermediate_size", "intermediate_size_mlp"), _read_widths, _write_widths),
    size("num_local_experts", "experts.count", 16),
    size("num_experts_per_tok", "experts.per_token", 1),
    Keys(("moe_layers", "interleave_moe_layer_step"), _read_experts, _write_experts),
    Keys(
        ("no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size"),
        _read_rotation,
        _write_rotation,
    ),
    Keys(_TEMPERATURE, _read_temperature, _write_temperature),
    flags("use_qk_norm", ("attention.qk_l2_norm",), default=True),
    ATTENTION_BIASES,
)
_FIXED = {
    "positions.interleaved": True,
    "experts.score": "sigmoid",
    "experts.renormalize": False,
    "experts.probs_on_input": True,
}


def _notices(config: ModelConfig) -> tuple[str, ...]:
    found = []
    if config.max_positions > _CHUNK:
        found.append(
            f"beyond {_CHUNK} tokens layers that rotate attend to chunks of {_CHUNK} and the others scale queries by their position, "
            f"for which Megatron core has no place: it computes the same up to {_CHUNK} tokens, of {config.max_positions}"
        )
    if config.has("qk_l2_norm skips_rope"):
        found.append(
            "Megatron core's qk_l2_norm is for all layers, the model's for those that rotate alone: in the others q_layernorm and "
            "k_layernorm have to be made IdentityOp when the model is built"
        )
    return tuple(found)


FAMILY = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM",),
    model_type="llama4_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | _FIXED,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized="rope interleaved pre_norm !norm_bias silu gated !zero_centered !mla mixture sigmoid_router probs_on_input",
    notices=_notices,
    assumed=_assumed,
    proven="custom module",
)
"""The custom module is IdentityOp, in the place of q and k norms. Models without such norms (Maverick) need only
megatron-core's own modules."""
