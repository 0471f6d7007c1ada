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

OwnSizes = tuple[tuple[str, int], ...]
"""(name, size) for the sizes that a layer has of its own; empty for most layers."""
RowOfLayers = tuple[Row, OwnSizes]
"""A row, in the layers with these sizes of their own."""


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
) -> dict[RowOfLayers, int]:
    """The elements of one layer's tensors on one rank, by row and kind of layer. They don't depend on the pipeline.

    Raises LayoutError if the layout can't shard the model.
    """
    rank_sizes(config, layout, shares_heads=True)
    divide(vocab_rows, layout.tp, "padded vocabulary", RANKS["tp"])
    sizes = config.sizes() | {"vocab": vocab_rows, "predicted": vocab_rows}
    kinds = dict.fromkeys(_own(config, layer) for layer in range(config.layer_count))
    found: dict[RowOfLayers, int] = {}
    for row in with_beside(rows, config):
        for own in kinds if row.stage == "layer" else ((),):
            found[row, own] = _elements(row, sizes | dict(own), layout)
    return found


def _own(config: ModelConfig, layer: int) -> OwnSizes:
    return tuple(config.layer_sizes(layer).items())


def chunk_share(
    elements: Mapping[RowOfLayers, int], config: ModelConfig, chunk: Chunk
) -> RankShare:
    """The parameters of one chunk. elements: row_elements of the layout."""
    dense = experts = 0
    for (row, own), each in elements.items():
        count = each * _times(row, own, config, chunk)
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


def _times(row: Row, own: OwnSizes, config: ModelConfig, chunk: Chunk) -> int:
    """The number of a row's tensors in a chunk: one per layer with these sizes of its own, plus Megatron core's second
    copies of an embedding."""
    beyond = config.layer_count - 1
    found = sum(
        row.exists(config, beyond if row.stage == "mtp" else layer)
        for _, layer in layers_of(row.stage, config, chunk)
        if row.stage != "layer" or _own(config, layer) == own
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
