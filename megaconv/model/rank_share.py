"""How many parameters one rank of a layout holds, worked out from a family's table without listing a tensor."""

from math import prod
from typing import NamedTuple

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, divide
from megaconv.model.sharding import RANKS, rank_sizes
from megaconv.model.table import Row, evaluate, layers_of, with_beside


class RankShare(NamedTuple):
    """Parameters of one pipeline rank; tensor and expert ranks of one stage have as many each."""

    dense: int
    """All but those of experts; tied embeddings that the last stage has again included."""
    experts: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


def rank_shares(rows: tuple[Row, ...], config: ModelConfig, layout: Layout, vocab_rows: int) -> list[RankShare]:
    """One for each pipeline rank. vocab_rows: of the whole vocabulary, padding included.

    Raises LayoutError for sizes that the model can't be sharded to.
    """
    rank_sizes(config, layout, shares_heads=True)
    rows = with_beside(rows, config)
    divide(vocab_rows, layout.tp, "padded vocabulary", RANKS["tp"])
    held = {pp_rank: RankShare(0, 0) for pp_rank in range(layout.pp)}
    sizes = config.sizes() | {"vocab": vocab_rows}
    elements = {row: _elements(row, sizes, layout) for row in rows}
    for chunk in layout.chunks():
        of_rank = held[chunk.pp_rank]
        for row in rows:
            count = elements[row] * _times(row, config, chunk)
            of_rank = RankShare(
                of_rank.dense + (0 if row.of_experts else count), of_rank.experts + (count if row.of_experts else 0)
            )
        held[chunk.pp_rank] = of_rank
    return list(held.values())


def _elements(row: Row, sizes: dict[str, int], layout: Layout) -> int:
    """Of one layer's tensors of a row, on one rank."""
    whole = sum(prod(evaluate(shape, sizes)) for shape in row.shapes)
    if row.of_experts:
        whole = whole * sizes["experts"] // layout.ep
    if row.tp is None:
        return whole
    return whole // (layout.etp if row.of_experts else layout.tp)


def _times(row: Row, config: ModelConfig, chunk: Chunk) -> int:
    """How often a chunk has a row's tensors: once a layer, and where Megatron core has a second copy of an embedding."""
    beyond = config.layer_count - 1
    found = sum(
        row.exists(config, beyond if row.stage == "mtp" else layer) for _, layer in layers_of(row.stage, config, chunk)
    )
    if not row.copies or not row.exists(config, 0):
        return found
    tied = config.tie_embeddings and chunk.is_last and not chunk.embeds and any(row.copied_with("head"))
    with_mtp = (
        bool(config.mtp_layers)
        and chunk.is_last
        and not chunk.embeds
        and any("core" in copied.names for copied in row.copied_with("mtp"))
    )
    return found + int(tied) + int(with_mtp) + int(chunk.starts_decoder and any(row.copied_with("decoder")))
