"""Granite 3 and 4, dense: Llama with factors on embedding, scores, residual branches and logits.

Megatron core has no such factors. A model whose factors differ from 1 is converted between Hugging Face's files only, and
trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, GATED_SILU, decoder_keys
from megaconv.families.parts.granite import FACTORS
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(positions=2048, tokens=(1, 2, None)),
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    *FACTORS,
)

FAMILY = replace(
    LLAMA, name="granite", architectures=("GraniteForCausalLM",), model_type="granite", rows=in_core(LLAMA.rows), keys=_KEYS,
    recognized=None, proven="names",
)  # fmt: skip
