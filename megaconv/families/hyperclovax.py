"""HyperCLOVA X: Granite with norms after sublayers as well, its own head size, and a factor that multiplies logits.

Megatron core has no such factors and norms. A model whose factors differ from 1 is converted between Hugging Face's files
only, and trained.
"""

from dataclasses import replace

from megaconv.families.granite import FAMILY as GRANITE
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    GATED_SILU,
    HEADS_DIVIDE_HIDDEN,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.keys import (
    Fields,
    Keys,
    Raw,
    choice,
    factor,
    flags,
    multiplier,
    need_positive,
)
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_MULTIPLIER = "attention_multiplier"
_BODY = decoder_keys(positions=2048, tokens=(1, 2, None))


def _read_scale(raw: Raw) -> Fields:
    """The factor on attention scores; null means 1 / sqrt(head_dim)."""
    usual = _BODY[-1].read(raw)["attention.head_dim"] ** -0.5
    scale = usual if raw.get(_MULTIPLIER) is None else need_positive(raw, _MULTIPLIER, usual)
    return {"attention.scale": None if scale == usual else scale}


def _write_scale(config: ModelConfig) -> Raw:
    return {_MULTIPLIER: config.attention.scale}


def _optional(row: Row) -> Row:
    """The row of a norm after a sublayer: only models with use_post_norm have it."""
    return replace(row, when="sandwich_norm") if "_output_norm" in row.canonical else row


_LAYER = norms_at(
    ATTENTION, MLP, before=("input_layernorm", "post_attention_layernorm"), after=("post_norm1", "post_norm2")
)  # fmt: skip
ROWS = in_core((EMBEDDING, *map(_optional, _LAYER), *HEAD))
_KEYS = (
    *_BODY,
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    choice("use_post_norm", "norm.place", {True: "both", False: "before"}, True),
    Keys((_MULTIPLIER,), _read_scale, _write_scale),
    multiplier("logits_scaling", "head.divisor"),
    factor("embedding_multiplier", "embedding_scale"),
    factor("residual_multiplier", "residual_scale"),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = replace(
    GRANITE, name="hyperclovax", architectures=("HyperCLOVAXForCausalLM",), model_type="hyperclovax", rows=ROWS, keys=_KEYS,
    fixed={name: value for name, value in GRANITE.fixed.items() if name != "norm.place"},
)  # fmt: skip
