"""Pegasus: as mBART, with computed positions (sines), and without norms after embeddings.

transformers 5 saves the tables of sines, and computes them if files lack them. megaconv keeps either form. Source:
PegasusConfig and modeling_pegasus.py of transformers 5.24.
"""

from collections.abc import Mapping

from formats.tensor import LazyTensor
from megaconv.families import Family
from megaconv.families.parts.bart_stacks import (
    BART_ALIASES,
    BART_FIXED,
    BART_IGNORED,
    BART_ONLY,
    BART_ROWS,
    bart_keys,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

_FIXED = {
    **BART_FIXED,
    "norm.place": "before",
    "positions.kind": "sinusoidal",
    "head.bias": True,
}


def _with_stored_positions(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """The model with its tables of sines, if the files hold one of them."""
    stored = any(name.endswith(".embed_positions.weight") for name in tensors)
    return changed(config, {"positions.stored": stored})


FAMILY = Family(
    name="pegasus",
    architectures=("PegasusForConditionalGeneration",),
    model_type="pegasus",
    rows=BART_ROWS,
    keys=bart_keys(
        vocab=50265, activation="gelu", scales=False, tokens=(None, 1, 0), start="pad_token_id"
    ),
    fixed=_FIXED,
    only=BART_ONLY,
    aliases=BART_ALIASES,
    ignored=BART_IGNORED,
    complete=_with_stored_positions,
    recognized=None,
    proven="names",
)
