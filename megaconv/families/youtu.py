"""Youtu-LLM: a dense model with DeepSeek V3's latent attention."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.latent_attention import (
    LATENT_ATTENTION,
    LATENT_HEADS,
    LATENT_NORMS,
    one_epsilon,
)
from megaconv.families.parts.row_changes import in_core

ROWS = in_core((EMBEDDING, *LATENT_ATTENTION, *MLP, *HEAD))
_KEYS = (
    *body_keys(positions=131072, ffn=6144, tied=True, tokens=(128000, 128001, None)),
    LATENT_HEADS,
)
_ONLY = {**SILU, "attention_bias": False, "rope_interleave": True}

FAMILY = Family(
    name="youtu",
    architectures=("YoutuForCausalLM",),
    model_type="youtu",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **LATENT_NORMS},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("mla",),
    recognized="mla !mixture !indexer silu gated",
    notices=one_epsilon,
)
