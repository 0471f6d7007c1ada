"""Gemma 2: Gemma's layers with norms also after their sublayers, windows on every other layer, and capped scores and
logits.

Megatron core has no modules for these norms and caps; Megatron-Bridge's Gemma 2 has them.
"""

from megaconv.families import Family
from megaconv.families.gemma import DECODER_ONLY
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    HEADS_DIVIDE_HIDDEN,
    LLAMA_LIKE,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.keys import Fields, Keys, Raw, choice, follows, maybe_number, need_size
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.config import ModelConfig

_LAYER = norms_at(
    ATTENTION, MLP,
    before=("input_layernorm", "pre_feedforward_layernorm"), after=("post_attention_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip
ROWS = in_core((EMBEDDING, *_LAYER, *HEAD))

_SCALAR = "query_pre_attn_scalar"


def _read_scale(raw: Raw) -> Fields:
    """The scale of attention scores: one over the root of query_pre_attn_scalar, which is mostly head_dim."""
    scalar, head_dim = need_size(raw, _SCALAR, 256), need_size(raw, "head_dim", 256)
    return {"attention.scale": None if scalar == head_dim else scalar**-0.5}


def _write_scale(config: ModelConfig) -> Raw:
    scale = config.attention.scale
    return {_SCALAR: config.attention.head_dim if scale is None else max(1, round(scale**-2))}


SANDWICHED = (
    ATTENTION_BIASES,
    choice(
        "hidden_activation",
        "mlp.activation",
        {"gelu_pytorch_tanh": "gelu_tanh"},
        "gelu_pytorch_tanh",
    ),
    DECODER_ONLY,
    Keys((_SCALAR,), _read_scale, _write_scale),
    follows("embedding_scale", lambda raw: raw["hidden_size"] ** 0.5),
)
"""Keys that Gemma 3 has as well."""
_KEYS = (
    *decoder_keys(positions=8192, kv_heads=4, head_dim=256, tokens=(2, 1, 0), tied=True),
    *SANDWICHED,
    windows_by_layer(4096, full_every=2),
    maybe_number("attn_logit_softcapping", "attention.score_cap", 50.0),
    maybe_number("final_logit_softcapping", "head.logit_cap", 30.0),
    HEADS_DIVIDE_HIDDEN,
)
GEMMA_2 = {
    **LLAMA_LIKE,
    "mlp.activation": "gelu_tanh",
    "norm.zero_centered": True,
    "norm.place": "both",
}
GEMMA_LIKE = "rope !interleaved !skips_rope !norm_bias zero_centered sandwich_norm gelu_tanh gated !mixture !mla !sinks"

FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    rows=ROWS,
    keys=_KEYS,
    fixed=GEMMA_2,
    ignored=ROPE_FREQUENCIES,
    features=("zero_centered",),
    recognized=f"{GEMMA_LIKE} !qk_norm",
    beyond_core=("attention.score_cap", "head.logit_cap"),
    assumed=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    proven="custom module",
)
