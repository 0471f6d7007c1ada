"""mT5: T5 1.1 for many languages. Its outputs are never scaled, also if its head is the embedding.

transformers 5 takes a head of its own from the files, whatever tie_word_embeddings says. Files without such a head share
the embedding. Megatron's T5 computes another function (see t5.py): these models are converted between Hugging Face's files.
Source: MT5Config and modeling_mt5.py of transformers 5.24.
"""

from collections.abc import Collection
from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.t5 import ALIASES, FIXED, IGNORED, KEYS, ONLY, SCALED, TIED
from megaconv.families.t5 import ROWS as T5_ROWS
from megaconv.model.config import ModelConfig

ROWS = hf_only(T5_ROWS)
SHARED_KEYS = with_defaults(
    without_keys(KEYS, TIED, SCALED),
    {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
)
"""The keys of T5 without those of its head."""


def with_stored_head(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set by the tensors whether the head is the embedding."""
    return replace(config, tie_embeddings="lm_head.weight" not in names)


FAMILY = Family(
    name="mt5",
    architectures=("MT5ForConditionalGeneration",),
    model_type="mt5",
    rows=ROWS,
    keys=(*SHARED_KEYS, flags(TIED, ("tie_embeddings",), default=True)),
    fixed=FIXED,
    only=ONLY,
    ignored=IGNORED,
    complete=with_stored_head,
    recognized=None,
    proven="names",
    aliases=ALIASES,
)
