"""`inspect --layout`: a picture of ranks and layers, and the share of each rank.

        layers 0-15
pp 0    E████████
pp 1            ████████H
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats.tensor import ITEMSIZE
from megaconv.commands.units import readable
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header
from megaconv.model.layout import Chunk, Layout
from megaconv.model.rank_share import RankShare, rank_shares

_WIDEST = 96
"""Columns for layers. For a deeper model, one column stands for several layers."""
_SHOWN_EXPERT_RANKS = 8
"""Number of expert ranks in the line about experts. If there are more, the line ends with the last one."""
BLOCKS = {"encoder": "▒", "dense": "█", "experts": "▓", "linear": "░"}
PLAIN_BLOCKS = {"encoder": "+", "dense": "#", "experts": "x", "linear": "="}
_KIND_NAMES = {
    "encoder": "a layer of the encoder",
    "dense": "a layer",
    "experts": "a layer with experts",
    "linear": "a layer of linear attention",
}


@dataclass(frozen=True)
class LayoutView:
    config: ModelConfig
    layout: Layout
    shares: list[RankShare]
    """The share of each pipeline rank."""
    itemsize: int

    @property
    def ranks(self) -> int:
        """Number of ranks that together hold the model once."""
        return (
            self.layout.tp
            * self.layout.pp
            * max(1, self.layout.ep * self.layout.etp // self.layout.tp)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **self.layout.sizes(),
            "ranks": self.ranks,
            "stages": [
                {
                    "pp_rank": chunk.pp_rank,
                    "vpp_rank": chunk.vpp_rank,
                    "first_layer": chunk.first_layer,
                    "layers": chunk.layers,
                    "encoder_layers": len(self._encoder_layers(chunk)),
                    "embedding": chunk.embeds,
                    "head": chunk.is_last,
                }
                for chunk in self.layout.chunks()
            ],
            "of_a_rank": [
                {
                    "pp_rank": pp_rank,
                    "parameters": share.parameters,
                    "expert_parameters": share.experts,
                    "bytes": share.parameters * self.itemsize,
                }
                for pp_rank, share in enumerate(self.shares)
            ],
            "experts_of_ep_rank": [list(experts) for experts in self._experts()],
        }

    def lines(self, *, blocks: bool = True) -> Iterator[str]:
        """Lines for people. blocks: True if the terminal can show block characters."""
        glyphs = BLOCKS if blocks else PLAIN_BLOCKS
        ranks = "rank holds" if self.ranks == 1 else "ranks hold"
        yield f"{self.layout}: {self.ranks} {ranks} the model once"
        yield from self._stages(glyphs)
        kinds = set(self._all_kinds())
        legend = ["E embedding", "H head"]
        for kind, name in _KIND_NAMES.items():
            if kind in kinds:
                legend.append(f"{glyphs[kind]} {name}")
        yield ", ".join(legend)
        yield from self._shares_of_a_layer()

    def _stages(self, glyphs: dict[str, str]) -> Iterator[str]:
        """A heading, and a line for each pipeline rank."""
        encoder, layers = self._encoder_count, self.config.layer_count
        per_column = -(-(encoder + layers) // _WIDEST)
        scale = f", {per_column} to a column" if per_column > 1 else ""
        numbers = _first_to_last(range(layers))
        if encoder:
            numbers = f"{_first_to_last(range(encoder))} of the encoder, {numbers} of the decoder"
        yield f"{'':<8}layers {numbers}{scale}"
        for pp_rank in range(self.layout.pp):
            parameters = self.shares[pp_rank].parameters
            size = readable(parameters * self.itemsize)
            row = self._row(pp_rank, per_column, glyphs)
            yield f"pp {pp_rank:<5}{row}  {parameters:,} parameters a rank, {size}"

    def _row(self, pp_rank: int, per_column: int, glyphs: dict[str, str]) -> str:
        kinds = self._all_kinds()
        width = -(-len(kinds) // per_column)
        cells = [" "] * (width + 2)
        for chunk in self.layout.chunks():
            if chunk.pp_rank != pp_rank:
                continue
            # The encoder's layers come first.
            first = self._encoder_count + chunk.first_layer
            own = [*self._encoder_layers(chunk), *range(first, first + chunk.layers)]
            for place in own:
                column = 1 + place // per_column
                cells[column] = glyphs[kinds[place]]
            if chunk.embeds:
                column = own[0] // per_column if own else 0
                cells[column] = "E"
            if chunk.is_last:
                cells[-1] = "H"
        return "".join(cells)

    @property
    def _encoder_count(self) -> int:
        """Number of layers of the encoder; 0 without one."""
        return self.config.encoder.layers

    def _encoder_layers(self, chunk: Chunk) -> range:
        """The layers of the encoder that a chunk holds."""
        if chunk.encoder is not None:
            return chunk.encoder
        return range(self._encoder_count if chunk.is_first else 0)

    def _all_kinds(self) -> list[str]:
        """Return the kind of each layer, those of an encoder first."""
        return ["encoder"] * self._encoder_count + self.kinds()

    def kinds(self) -> list[str]:
        """Return the kind of each layer, without those of an encoder: `dense`, `experts` or `linear`."""
        return [self._kind(layer) for layer in range(self.config.layer_count)]

    def _kind(self, layer: int) -> str:
        if self.config.has("moe", layer):
            return "experts"
        return "linear" if self.config.has("linear", layer) else "dense"

    def _experts(self) -> list[range]:
        count = self.config.experts.count
        if not count:
            return []
        each = count // self.layout.ep
        return [range(rank * each, (rank + 1) * each) for rank in range(self.layout.ep)]

    def _shares_of_a_layer(self) -> Iterator[str]:
        tp, etp = self.layout.tp, self.layout.etp
        if tp > 1:
            yield f"tp: each of {tp} tensor ranks has 1/{tp} of attention, dense MLPs, embedding and head; norms are on all"
        if self.config.experts.count:
            parts = f"; each in {etp} parts (etp)" if etp > 1 else ""
            yield f"experts of each layer: {self._ranges_of_experts()}{parts}"
            replicas = self.ranks // (tp * self.layout.pp)
            if replicas > 1:
                yield f"all weights but the experts' are on {replicas} data-parallel ranks"

    def _ranges_of_experts(self) -> str:
        """The experts of the first ranks and of the last rank."""
        ranges = [f"ep {rank}: {_first_to_last(held)}" for rank, held in enumerate(self._experts())]
        shown = ", ".join(ranges[:_SHOWN_EXPERT_RANKS])
        if len(ranges) > _SHOWN_EXPERT_RANKS:
            shown += f" ... {ranges[-1]}"
        return shown


def _first_to_last(held: range) -> str:
    """`4-7`, or `4` for a single expert."""
    return f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0])


def layout_view(header: Header) -> LayoutView:
    """The view of a checkpoint's own layout, or of a single rank if it isn't sharded. Raises LayoutError."""
    config = header.config
    layout = header.layout or Layout(stage_layers=(config.layer_count,))
    rows = header.padded_vocab or config.vocab
    shares = rank_shares(family(config.family).rows, config, layout, rows)
    return LayoutView(config, layout, shares, ITEMSIZE[config.dtype])
