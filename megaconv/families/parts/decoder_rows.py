"""Tables that are Llama's but for their norms' biases, a gate or some names: made of its rows.

in_core(rows)            without names in Megatron's legacy models and Meta's files
with_norm_biases(rows)   LayerNorm: model.norm.{weight|bias}, decoder.final_layernorm.{weight|bias}
without_gate(rows)       mlp.up_proj, mlp.down_proj; linear_fc1 holds the first alone
respelled(rows, names)   other names for some rows
"""

from collections.abc import Mapping
from dataclasses import replace

from megaconv.model.table import Row, Separate, Spelling

Rows = tuple[Row, ...]


def in_core(rows: Rows) -> Rows:
    """The names of Hugging Face and of Megatron core alone: any other naming scheme is refused, with this reason."""
    return tuple(row.without("legacy", "meta") for row in rows)


def with_norm_biases(rows: Rows) -> Rows:
    """Norms of hidden states have biases; those of q and k, which are shorter, don't."""

    def with_bias(row: Row) -> Row:
        names = {
            key: tuple(replace(one, name=one.name.removesuffix("weight") + "{weight|bias}") for one in spelled)
            for key, spelled in row.names.items()
        }
        canonical = row.canonical.removesuffix("weight") + "{weight|bias}"
        return replace(row, canonical=canonical, shapes=row.shapes * 2, names=names)

    def is_norm(row: Row) -> bool:
        return row.canonical.endswith("_norm.weight") and row.shapes == ("hidden",)

    return tuple(with_bias(row) if is_norm(row) else row for row in rows)


def without_gate(rows: Rows) -> Rows:
    """MLPs of two matrices."""

    def plain(row: Row) -> Row:
        names = {
            key: tuple(Separate(one.name.replace("{gate|up}", "up")) for one in spelled)
            for key, spelled in row.names.items()
        }
        return replace(row, canonical=row.canonical.replace("{gate|up}", "up"), shapes=row.shapes[:1], names=names)

    return tuple(plain(row) if "{gate|up}" in row.canonical else row for row in rows)


def respelled(rows: Rows, names: Mapping[str, Mapping[str, Spelling]]) -> Rows:
    """names: of rows by their canonical pattern: what naming schemes call them instead. Raises KeyError for a row that there isn't."""
    known = {row.canonical for row in rows}
    for canonical in names:
        if canonical not in known:
            raise KeyError(f"no row of the table is {canonical}")
    return tuple(row.renamed(**names.get(row.canonical, {})) for row in rows)
