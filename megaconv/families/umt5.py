"""UMT5: mT5 with a table of relative positions in each layer. Its outputs may be scaled.

    {encoder|decoder}.block.{l}.layer.0.SelfAttention.relative_attention_bias.weight    T5 has it in block 0 alone

As in mT5, the files show whether the head is the embedding. scale_decoder_outputs says whether outputs are divided by the
root of the hidden size. Without this key, tie_word_embeddings says it. Source: UMT5Config and modeling_umt5.py of
transformers 5.24.
"""

from megaconv.families import Family
from megaconv.families.mt5 import ROWS as MT5_ROWS
from megaconv.families.mt5 import SHARED_KEYS, with_stored_head
from megaconv.families.parts.keys import Fields, Keys, Raw, need_flag, need_size
from megaconv.families.parts.row_changes import without_rows
from megaconv.families.t5 import ALIASES, FIXED, ONLY, SCALED, TIED
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_STAGES = {"encoder": "encoder", "decoder": "layer"}
_TABLES = tuple(
    Row(f"{stack}.layers.{{l}}.attn.relative_bias.weight", ("relative_buckets heads",), stage=stage, when="relative_by_layer",
        hf=f"{stack}.block.{{l}}.layer.0.SelfAttention.relative_attention_bias.weight")
    for stack, stage in _STAGES.items()
)  # fmt: skip
_OF_STACKS = tuple(f"{stack}.relative_bias.weight" for stack in _STAGES)
ROWS = (*without_rows(MT5_ROWS, *_OF_STACKS), *_TABLES)


def _read_head(raw: Raw) -> Fields:
    is_tied = need_flag(raw, TIED, True)
    is_scaled = need_flag(raw, SCALED, is_tied)
    divisor = need_size(raw, "d_model") ** 0.5 if is_scaled else None
    return {"tie_embeddings": is_tied, "head.divisor": divisor}


def _write_head(config: ModelConfig) -> Raw:
    return {TIED: config.tie_embeddings, SCALED: config.head.divisor is not None}


FAMILY = Family(
    name="umt5",
    architectures=("UMT5ForConditionalGeneration",),
    model_type="umt5",
    rows=ROWS,
    keys=(*SHARED_KEYS, Keys((TIED, SCALED), _read_head, _write_head)),
    fixed={**FIXED, "positions.by_layer": True},
    only=ONLY,
    complete=with_stored_head,
    recognized=None,
    proven="names",
    aliases=ALIASES,
)
