"""Falcon-H1: attention and Mamba 2 side by side in each layer, then a gated MLP, with factors on activations.

    hf     model.layers.{l}.{input_layernorm, mamba, self_attn, pre_ff_layernorm, feed_forward}, model.final_layernorm

Megatron core has no layers with both. Converted between Hugging Face's files, and trained; core's names are those of the
trainer's checkpoints. Source: FalconH1Config and modeling_falcon_h1.py of transformers 5.23.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.bamba import FEED_FORWARD
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    factor,
    flags,
    multiplier,
    need_flag,
    need_number,
    number,
)
from megaconv.families.parts.mamba_and_mlp import MAMBA, STATE, WIDTH
from megaconv.families.parts.row_changes import in_core, without_rows
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.table import Row

_LAYER = "decoder.layers.{l}."
_NORM = "layers.{l}.input_norm.weight"


def _side_by_side(row: Row) -> Row:
    """The row of attention or of a Mamba 2, whose norm at the end some models lack. Both read the same normed input."""
    if row.canonical == _NORM:
        return row.without("core").renamed(core=_LAYER + "input_layernorm.weight")
    names = tuple(
        replace(one, name=one.name.replace(_LAYER, _LAYER + "side_by_side."))
        for one in row.names["core"]
    )
    row = row.renamed(core=names)
    return replace(row, when="mamba mamba_norm") if "out_norm" in row.canonical else row


_MAMBA = tuple(_side_by_side(row) for row in MAMBA if row.canonical != _NORM)
_FINAL_NORM = HEAD[0].renamed(hf="model.final_layernorm.weight")
_ATTENTION = tuple(
    _side_by_side(row) for row in without_rows(ATTENTION, "layers.{l}.attn.{q|k}_norm.weight")
)
ROWS = in_core((EMBEDDING, *_ATTENTION, *_MAMBA, *FEED_FORWARD, _FINAL_NORM, HEAD[1]))

_D_SSM = "mamba_d_ssm"


def _write_width(config: ModelConfig) -> Raw:
    heads, head_dim = config.mamba.heads, config.mamba.head_dim
    return {_D_SSM: heads * head_dim, "mamba_n_heads": heads, "mamba_d_head": head_dim}


def _read_width(raw: Raw) -> Fields:
    """The heads of Mamba 2. Without mamba_d_ssm the width is 1024; null means mamba_expand x hidden_size."""
    return WIDTH.read({_D_SSM: 1024, **raw})


def _read_norm(raw: Raw) -> Fields:
    before = need_flag(raw, "mamba_norm_before_gate", True)
    if not need_flag(raw, "mamba_rms_norm", False):
        return {"mamba.norm": "none"}
    return {"mamba.norm": "before_gate" if before else "after_gate"}


def _write_norm(config: ModelConfig) -> Raw:
    place = config.mamba.norm
    return {"mamba_rms_norm": place != "none", "mamba_norm_before_gate": place == "before_gate"}


def _factors(key: str, *fields: str) -> Keys:
    """A list of factors. A missing list and null mean factors of 1."""

    def read(raw: Raw) -> Fields:
        stated = raw.get(key)
        values = [1.0] * len(fields) if stated is None else stated
        if not isinstance(values, list) or len(values) != len(fields):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} should be {len(fields)} numbers, found {stated!r}"
            )
        numbers = (need_number({key: value}, key, 1.0) for value in values)
        return dict(zip(fields, numbers, strict=True))

    return Keys((key,), read, lambda config: {key: [value_of(config, name) for name in fields]})


_PARTS = ("z", "x", "b", "c", "dt")
_KEYS = (
    *decoder_keys(positions=8192, kv_heads=8, ffn=14336, epsilon=1e-5, tokens=(1, 2, 0)),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    Keys((_D_SSM, *WIDTH.names), _read_width, _write_width),
    *STATE,
    Keys(("mamba_rms_norm", "mamba_norm_before_gate"), _read_norm, _write_norm),
    factor("embedding_multiplier", "embedding_scale"),
    multiplier("lm_head_multiplier", "head.divisor"),
    number("key_multiplier", "factors.keys", 1.0),
    number("attention_in_multiplier", "factors.attention_in", 1.0),
    number("attention_out_multiplier", "factors.attention_out", 1.0),
    number("ssm_in_multiplier", "factors.mamba_in", 1.0),
    number("ssm_out_multiplier", "factors.mamba_out", 1.0),
    _factors("ssm_multipliers", *(f"factors.mamba_{part}" for part in _PARTS)),
    _factors("mlp_multipliers", "factors.mlp_gate", "factors.mlp_down"),
)
_ONLY = {
    **SILU,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
}

FAMILY = Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    model_type="falcon_h1",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, "layers.mixer": "side_by_side"},
    only=_ONLY,
    aliases={"layer_types": "layers_block_type"},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
