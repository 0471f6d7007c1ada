"""Granite 3 and 4, dense: Llama with factors on embedding, scores, residual branches and logits.

Megatron core has no such factors. A model whose factors differ from 1 is converted between Hugging Face's files only, and
trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, GATED_SILU, decoder_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, factor, flags, need_number
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig

_HEADS = decoder_keys(positions=2048, tokens=(1, 2, None))
_MULTIPLIER = "attention_multiplier"


def _read_scale(raw: Raw) -> Fields:
    """The factor on attention scores."""
    heads = _HEADS[-1].read(raw)
    scale = need_number(raw, _MULTIPLIER, 1.0)
    return {"attention.scale": None if scale == heads["attention.head_dim"] ** -0.5 else scale}


def _write_scale(config: ModelConfig) -> Raw:
    scale = config.attention.scale
    return {_MULTIPLIER: config.attention.head_dim**-0.5 if scale is None else scale}


FACTORS = (
    Keys((_MULTIPLIER,), _read_scale, _write_scale),
    factor("embedding_multiplier", "embedding_scale"),
    factor("residual_multiplier", "residual_scale"),
    factor("logits_scaling", "head.divisor"),
)
"""Keys of all Granite models."""
_KEYS = (
    *_HEADS,
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    *FACTORS,
)

FAMILY = replace(
    LLAMA, name="granite", architectures=("GraniteForCausalLM",), model_type="granite", rows=in_core(LLAMA.rows), keys=_KEYS,
    recognized=None, proven="names",
)  # fmt: skip
