"""The number of parameters that one rank of a layout holds, computed from a family's table without listing tensors."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.patterns import evaluate
from megaconv.model.rank import RANKS
from megaconv.model.sharding import rank_sizes
from megaconv.model.table import Row, layers_of, with_beside


class RankShare(NamedTuple):
    """Parameters of one pipeline rank. All tensor and expert ranks of a stage hold the same number."""

    dense: int
    """All parameters except those of experts. The last stage's copy of tied embeddings is included."""
    experts: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


def rank_shares(
    rows: tuple[Row, ...], config: ModelConfig, layout: Layout, vocab_rows: int
) -> list[RankShare]:
    """The parameters of each pipeline rank. vocab_rows: embedding rows of the whole vocabulary, including padding.

    Raises LayoutError if the layout can't shard the model.
    """
    elements = row_elements(rows, config, layout, vocab_rows)
    held = {pp_rank: RankShare(0, 0) for pp_rank in range(layout.pp)}
    for chunk in layout.chunks():
        before, more = held[chunk.pp_rank], chunk_share(elements, config, chunk)
        held[chunk.pp_rank] = RankShare(before.dense + more.dense, before.experts + more.experts)
    return list(held.values())


def row_elements(
    rows: tuple[Row, ...], config: ModelConfig, layout: Layout, vocab_rows: int
) -> dict[Row, int]:
    """The elements of one layer's tensors on one rank, by row. They don't depend on the pipeline.

    Raises LayoutError if the layout can't shard the model.
    """
    rank_sizes(config, layout, shares_heads=True)
    divide(vocab_rows, layout.tp, "padded vocabulary", RANKS["tp"])
    sizes = config.sizes() | {"vocab": vocab_rows}
    return {row: _elements(row, sizes, layout) for row in with_beside(rows, config)}


def chunk_share(elements: Mapping[Row, int], config: ModelConfig, chunk: Chunk) -> RankShare:
    """The parameters of one chunk. elements: row_elements of the layout."""
    dense = experts = 0
    for row, each in elements.items():
        count = each * _times(row, config, chunk)
        if row.of_experts:
            experts += count
        else:
            dense += count
    return RankShare(dense, experts)


def _elements(row: Row, sizes: dict[str, int], layout: Layout) -> int:
    """The number of elements of one layer's tensors of a row, on one rank."""
    whole = sum(prod(evaluate(shape, sizes)) for shape in row.shapes)
    if row.of_experts:
        whole = whole * sizes["experts"] // layout.ep
    if row.tp is None:
        return whole
    return whole // (layout.etp if row.of_experts else layout.tp)


def _times(row: Row, config: ModelConfig, chunk: Chunk) -> int:
    """The number of a row's tensors in a chunk: one per layer, plus Megatron core's second copies of an embedding."""
    beyond = config.layer_count - 1
    found = sum(
        row.exists(config, beyond if row.stage == "mtp" else layer)
        for _, layer in layers_of(row.stage, config, chunk)
    )
    if not row.copies or not row.exists(config, 0):
        return found
    if chunk.starts_decoder and row.has_copies("decoder"):
        found += 1
    if not chunk.is_last or chunk.embeds:
        return found
    if config.tie_embeddings and row.has_copies("head"):
        found += 1
    copies_with_mtp = row.copied_with("mtp") if config.mtp_layers else ()
    if any("core" in copied.names for copied in copies_with_mtp):
        found += 1
    return found
