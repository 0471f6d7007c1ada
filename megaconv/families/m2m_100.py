"""M2M-100 and NLLB: as mBART, with computed positions (sines), and without norms after embeddings and a bias of the head.

Source: M2M100Config and modeling_m2m_100.py of transformers 5.24.
"""

from megaconv.families import Family
from megaconv.families.parts.bart_stacks import (
    BART_ALIASES,
    BART_FIXED,
    BART_IGNORED,
    BART_ONLY,
    BART_ROWS,
    COMPUTED_POSITIONS,
    bart_keys,
)

_FIXED = {
    **BART_FIXED,
    "norm.place": "before",
    "positions.kind": "sinusoidal",
    "positions.offset": 2,
}

FAMILY = Family(
    name="m2m_100",
    architectures=("M2M100ForConditionalGeneration",),
    model_type="m2m_100",
    rows=BART_ROWS,
    keys=bart_keys(
        vocab=128112, activation="relu", scales=True, tokens=(0, 2, 1), start="eos_token_id"
    ),
    fixed=_FIXED,
    only=BART_ONLY,
    aliases=BART_ALIASES,
    ignored=(*BART_IGNORED, *COMPUTED_POSITIONS),
    recognized=None,
    proven="names",
)
