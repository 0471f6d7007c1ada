"""Pebble: Llama's layers and configuration, under other names."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.model.table import Row

_NAMES = {
    "model.embed_tokens": "body.embed",
    "model.layers.": "body.blocks.",
    "model.norm": "body.last_norm",
}


def _renamed(row: Row) -> Row:
    """Only Hugging Face's names differ. Meta's files and Megatron's legacy models don't support a Pebble."""
    (spelling,) = row.names["hf"]
    name = spelling.name
    for llama, pebble in _NAMES.items():
        name = name.replace(llama, pebble)
    return row.renamed(hf=name).without("legacy", "meta")


ROWS = tuple(_renamed(row) for row in LLAMA_ROWS)
FAMILY = Family(
    "pebble",
    ("PebbleForCausalLM",),
    "pebble",
    ROWS,
    keys=decoder_keys(positions=2048),
    fixed=LLAMA_LIKE,
    only=SILU,
)
