"""BART: an encoder and a decoder with norms after the residual sums, a norm after each embedding, and learned positions.

The first two rows of a table of positions are unused. Megatron core has no such layers: these models are converted between
Hugging Face's files. Source: BartConfig and modeling_bart.py of transformers 5.24.
"""

from megaconv.families import Family
from megaconv.families.parts.bart_stacks import (
    BART_ALIASES,
    BART_FIXED,
    BART_IGNORED,
    BART_ONLY,
    BART_ROWS,
    bart_keys,
)

_FIXED = {
    **BART_FIXED,
    "norm.place": "after_sum",
    "norm.final": False,
    "norm.embedding": True,
    "positions.kind": "learned",
    "positions.offset": 2,
    "head.bias": True,
}

FAMILY = Family(
    name="bart",
    architectures=("BartForConditionalGeneration",),
    model_type="bart",
    rows=BART_ROWS,
    keys=bart_keys(
        vocab=50265, activation="gelu", scales=False, tokens=(0, 2, 1), start="eos_token_id"
    ),
    fixed=_FIXED,
    only=BART_ONLY,
    aliases=BART_ALIASES,
    ignored=BART_IGNORED,
    recognized=None,
    proven="names",
)
