"""Gemma 3n, text-only models: Gemma 4's attention, a second embedding, and four residual streams (AltUp).

Beside attention, each layer has a product of two small matrices (LAuReL). The first layers set most elements of their
MLP's first projection to 0. Megatron core and Megatron-Bridge have no such modules: these models are converted between
Hugging Face's files only.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.gemma4_text import EMBEDDING_AND_ACTIVATION, NORMED_VALUES, SANDWICHED
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, decoder_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    maybe_number,
    need_size,
    require_each_layer,
    size,
)
from megaconv.families.parts.layer_inputs import LAYER_INPUT_KEYS, LAYER_INPUTS
from megaconv.families.parts.layer_ropes import layer_ropes
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.parts.shared_kv import (
    SHARED_LAYERS,
    count_sharing,
    sharing_layers,
    unused_keys_and_values,
    with_shared_kv,
)
from megaconv.families.parts.windows import (
    layer_types,
    windowed_layers,
    windows_but_every,
    windows_on,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each, per_layer
from megaconv.model.table import Row

_HF = "model.layers.{l}."
_ALTUP, _LAUREL = _HF + "altup.", _HF + "laurel."
_STREAMS = (
    Row("streams.{1|2|3}.enter.weight", ("hidden hidden",) * 3, stage="first", hf="model.altup_projections.{0|1|2}.weight"),
    Row("streams.{1|2|3}.leave.weight", ("hidden hidden",) * 3, stage="last", hf="model.altup_unembed_projections.{0|1|2}.weight"),
    Row("layers.{l}.streams.router_norm.weight", ("hidden",), hf=_ALTUP + "router_norm.weight"),
    Row("layers.{l}.streams.router.weight", ("streams hidden",), hf=_ALTUP + "modality_router.weight"),
    Row("layers.{l}.streams.predict.weight", ("streams*streams streams",), hf=_ALTUP + "prediction_coefs.weight"),
    Row("layers.{l}.streams.correct.weight", ("streams streams",), hf=_ALTUP + "correction_coefs.weight"),
    Row("layers.{l}.streams.scale", ("hidden",), hf=_ALTUP + "correct_output_scale"),
    Row("layers.{l}.laurel.left.weight", ("laurel_rank hidden",), hf=_LAUREL + "linear_left.weight"),
    Row("layers.{l}.laurel.right.weight", ("hidden laurel_rank",), hf=_LAUREL + "linear_right.weight"),
    Row("layers.{l}.laurel_norm.weight", ("hidden",), hf=_LAUREL + "post_laurel_norm.weight"),
)  # fmt: skip
ROWS = hf_only((EMBEDDING, *with_shared_kv(SANDWICHED), *LAYER_INPUTS, *_STREAMS, *HEAD))

_TYPES, _WINDOW, _WIDTH, _SPARSITY = "layer_types", "sliding_window", "intermediate_size", "activation_sparsity_pattern"  # fmt: skip


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, "num_hidden_layers")
    windowed = windowed_layers(raw, windows_but_every(5, raw))
    sharing = sharing_layers(raw, windowed, 15)
    return {
        **windows_on(raw, windowed, need_size(raw, _WINDOW, 512)),
        "layers.shares_kv": per_layer(sharing, layers, True, False),
    }


def _write_layers(config: ModelConfig) -> Raw:
    window = config.window or 512
    return {_TYPES: layer_types(config), _WINDOW: window, SHARED_LAYERS: count_sharing(config)}


def _read_widths(raw: Raw) -> Fields:
    """The widths of the MLPs: one for all layers, or one for each."""
    layers, stated = need_size(raw, "num_hidden_layers"), raw.get(_WIDTH)
    if not isinstance(stated, list):
        return {"mlp.ffn": need_size(raw, _WIDTH, 16384)}
    require_each_layer(_WIDTH, stated, layers)
    widths = [need_size({_WIDTH: width}, _WIDTH) for width in stated]
    widest = max(widths)
    own = tuple(None if width == widest else width for width in widths)
    return {"mlp.ffn": widest, "layers.ffn": one_or_each(own)}


def _write_widths(config: ModelConfig) -> Raw:
    widths = [kind.ffn or config.mlp.ffn for kind in config.layers]
    return {_WIDTH: widths[0] if len(set(widths)) == 1 else widths}


def _read_sparsity(raw: Raw) -> Fields:
    """The sparsity of the MLPs. If the key is missing, the first ten of more than ten layers have one."""
    layers, stated = need_size(raw, "num_hidden_layers"), raw.get(_SPARSITY)
    sparse = 10 if layers > 10 else 0
    shares: Any = [0.95] * sparse + [0.0] * (layers - sparse) if stated is None else stated
    if not isinstance(shares, list) or not all(type(each) in (int, float) for each in shares):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_SPARSITY} should be a list of numbers, found {stated!r:.60}"
        )
    require_each_layer(_SPARSITY, shares, layers)
    return {"layers.sparsity": one_or_each(tuple(float(each) for each in shares))}


def _write_sparsity(config: ModelConfig) -> Raw:
    return {_SPARSITY: [kind.sparsity for kind in config.layers]}


_BODY = decoder_keys(
    positions=32768, kv_heads=2, head_dim=256, rotation=layer_ropes(1e6, 1e4), tokens=(2, 1, 0), tied=True
)  # fmt: skip
_KEYS = (
    *without_keys(_BODY, _WIDTH),
    Keys((_TYPES, _WINDOW, SHARED_LAYERS), _read_layers, _write_layers),
    Keys((_WIDTH,), _read_widths, _write_widths),
    Keys((_SPARSITY,), _read_sparsity, _write_sparsity),
    LAYER_INPUT_KEYS,
    *EMBEDDING_AND_ACTIVATION,
    maybe_number("final_logit_softcapping", "head.logit_cap", 30.0),
    Keys(("altup_active_idx",), lambda raw: {"streams.active": raw.get("altup_active_idx", 0)},
         lambda config: {"altup_active_idx": config.streams.active}),
    flags("altup_correct_scale", ("streams.scaled",), default=True),
    size("laurel_rank", "streams.laurel_rank", 64),
    HEADS_DIVIDE_HIDDEN,
)  # fmt: skip

FAMILY = Family(
    name="gemma3n_text",
    architectures=("Gemma3nForCausalLM",),
    model_type="gemma3n_text",
    rows=ROWS,
    keys=_KEYS,
    fixed={**NORMED_VALUES, "streams.count": 4},
    only={"attention_bias": False, "altup_num_inputs": 4},
    ignored=ROPE_FREQUENCIES,
    unused=unused_keys_and_values,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
