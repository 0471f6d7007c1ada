"""mBART: as BART, with norms before the sublayers and a norm after each stack.

Source: MBartConfig and modeling_mbart.py of transformers 5.24.
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
    "norm.place": "before",
    "norm.embedding": True,
    "positions.kind": "learned",
    "positions.offset": 2,
    "head.bias": True,
}

FAMILY = Family(
    name="mbart",
    architectures=("MBartForConditionalGeneration",),
    model_type="mbart",
    rows=BART_ROWS,
    keys=bart_keys(vocab=50265, activation="gelu", scales=False, tokens=(0, 2, 1)),
    fixed=_FIXED,
    only=BART_ONLY,
    aliases=BART_ALIASES,
    ignored=BART_IGNORED,
    recognized=None,
    proven="names",
)
