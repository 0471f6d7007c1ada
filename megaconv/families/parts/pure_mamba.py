"""Pure Mamba models: each layer is a mixer, without an MLP.

They have no attention, no MLP and no table of positions. A description needs numbers for them all the same. These numbers
change nothing, and tensor-parallel ranks have to divide them.
"""

from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_POSITIONS = 1 << 20
"""A number of positions that no sequence reaches: the default for a model without a limit."""
_LIMIT = "max_position_embeddings"


def with_ends(mixers: tuple[Row, ...]) -> tuple[Row, ...]:
    """The table of a model. mixers: the rows of its layers."""
    return (
        EMBEDDING.renamed(hf="backbone.embeddings.weight"),
        *mixers,
        HEAD[0].renamed(hf="backbone.norm_f.weight", core="decoder.final_norm.weight"),
        HEAD[1],
    )


def unused_parts(hidden: int, heads: int, head_dim: int) -> Fields:
    """The sizes of the parts that the model lacks."""
    return {
        "attention.heads": heads,
        "attention.kv_heads": heads,
        "attention.head_dim": head_dim,
        "mlp.ffn": 4 * hidden,
    }


def _write_positions(config: ModelConfig) -> Raw:
    """Write a limit only if the model came with one. transformers' classes have no such key."""
    return {} if config.max_positions == _POSITIONS else {_LIMIT: config.max_positions}


MAX_POSITIONS = Keys(
    (_LIMIT,), lambda raw: {"max_positions": need_size(raw, _LIMIT, _POSITIONS)}, _write_positions
)
OLDER_EMBEDDING = {"embedding.weight": "embeddings.weight"}
"""The embedding's name in older files."""
