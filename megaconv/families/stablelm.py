"""StableLM 1.6B, 3B: Llama with LayerNorm, of whose heads a quarter rotates.

Megatron-LM's own script for Llama 3 8B trains such a model: LayerNorm, and one that multiplies with its weight + 1, for which
config.json has no key, so that it goes from Megatron to Megatron alone.
"""

from megaconv.families import Family
from megaconv.families.llama import IGNORED
from megaconv.families.llama import ROWS as LLAMA_ROWS
from megaconv.families.parts.decoder_keys import (
    DENSE,
    LAYER_NORM,
    LLAMA_LIKE,
    SILU,
    body_keys,
    heads,
    partial_rotation,
)
from megaconv.families.parts.decoder_rows import in_core, with_norm_biases
from megaconv.families.parts.keys import flags

_KEYS = (
    *body_keys(
        positions=4096, epsilon=1e-5, epsilon_key="layer_norm_eps", partial=partial_rotation(0.25), tokens=(0, 0, None)
    ),
    heads(32, own_size=False),
    flags("use_qkv_bias", ("attention.qkv_bias",), default=False),
)
_ONLY = {**SILU, "use_parallel_residual": False, "qk_layernorm": False}
"""StableLM 2 12B has both: attention beside the MLP, which Megatron core has no layer for, and a norm for every single head."""

FAMILY = Family(
    "stablelm", ("StableLmForCausalLM",), "stablelm", in_core(with_norm_biases(LLAMA_ROWS)), keys=_KEYS,
    fixed=LLAMA_LIKE | LAYER_NORM, only=_ONLY, ignored=IGNORED, recognized=f"{DENSE} norm_bias silu gated",
)  # fmt: skip
