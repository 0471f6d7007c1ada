"""OLMo 1: Llama with LayerNorms that have no trained values, and in some models limits of q, k and v.

Megatron core has no such norms: these models are converted between Hugging Face's files, and trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    SILU,
    body_keys,
    heads,
)
from megaconv.families.parts.keys import maybe_number
from megaconv.families.parts.row_changes import in_core, without_norms

_KEYS = (
    *body_keys(positions=2048, epsilon_key=None, tokens=(None, 50279, 1)),
    heads(None, own_size=False),
    ATTENTION_BIASES,
    maybe_number("clip_qkv", "attention.clip", None),
)
_NORM = {"norm.kind": "LayerNorm", "norm.weight": False, "norm.epsilon": 1e-5}

FAMILY = replace(
    LLAMA, name="olmo", architectures=("OlmoForCausalLM",), model_type="olmo", rows=in_core(without_norms(LLAMA.rows)), keys=_KEYS,
    fixed={**LLAMA_LIKE, **_NORM}, only=SILU, recognized=None, proven="names",
)  # fmt: skip
