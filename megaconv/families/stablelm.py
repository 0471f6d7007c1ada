"""StableLM 1.6B and 3B: Llama with LayerNorm, and rope on a quarter of each head.

Megatron-LM's own script for Llama 3 8B trains such a model: it has a LayerNorm that multiplies by its weight + 1.
config.json has no key for that, so such a model converts only from Megatron to Megatron.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    DENSE,
    LAYER_NORM,
    LLAMA_LIKE,
    SILU,
    body_keys,
    heads,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import in_core, with_norm_biases

_KEYS = (
    *body_keys(
        positions=4096,
        epsilon=1e-5,
        epsilon_key="layer_norm_eps",
        partial=partial_rotation(0.25),
        tokens=(0, 0, None),
    ),
    heads(32, own_size=False),
    flags("use_qkv_bias", ("attention.qkv_bias",), default=False),
)
_ONLY = {**SILU, "use_parallel_residual": False, "qk_layernorm": False}
"""StableLM 2 12B has both: attention parallel to the MLP, for which Megatron core has no layer, and a norm for every
single head."""

FAMILY = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    model_type="stablelm",
    rows=in_core(with_norm_biases(LLAMA_ROWS)),
    keys=_KEYS,
    fixed=LLAMA_LIKE | LAYER_NORM,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{DENSE} norm_bias silu gated",
)
