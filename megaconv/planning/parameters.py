"""The parameters of any range of layers on one rank, looked up in sums over the layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout, padded_vocab
from megaconv.model.rank_share import RankShare, RowOfLayers, chunk_share, row_elements


@dataclass(frozen=True)
class Parameters:
    """The parameters of the chunks of one rank, for one tensor-parallel and one expert-parallel size."""

    config: ModelConfig
    elements: Mapping[RowOfLayers, int]
    """Elements of one layer's tensors on the rank, by row and kind of layer."""

    @classmethod
    def of(
        cls, config: ModelConfig, tp: int, ep: int, etp: int, vocab_divisor: int
    ) -> "Parameters":
        """Raises LayoutError if the model can't be sharded so."""
        layout = Layout(tp=tp, ep=ep, etp=etp, stage_layers=(config.layer_count,))
        vocab_rows = padded_vocab(config.vocab, vocab_divisor, tp)
        rows = family(config.family).rows
        return cls(config, row_elements(rows, config, layout, vocab_rows))

    def chunk(self, chunk: Chunk) -> RankShare:
        """Return the parameters of a chunk."""
        end = chunk.first_layer + chunk.layers
        ends = self._ends[chunk.is_first, chunk.is_last]
        dense = self._dense[end] - self._dense[chunk.first_layer] + ends.dense
        experts = self._experts[end] - self._experts[chunk.first_layer] + ends.experts
        return RankShare(dense, experts)

    def layer(self, number: int) -> RankShare:
        """Return the parameters of one layer."""
        return self._layers[number]

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(share.parameters for share in self._layers)

    @cached_property
    def _layers(self) -> list[RankShare]:
        """The parameters of each layer."""
        chunks = (
            Chunk(0, 0, layer, 1, is_first=False, is_last=False)
            for layer in range(self.config.layer_count)
        )
        return [chunk_share(self.elements, self.config, chunk) for chunk in chunks]

    @cached_property
    def _dense(self) -> list[int]:
        return [0, *accumulate(share.dense for share in self._layers)]

    @cached_property
    def _experts(self) -> list[int]:
        return [0, *accumulate(share.experts for share in self._layers)]

    @cached_property
    def _ends(self) -> dict[tuple[bool, bool], RankShare]:
        """(is_first, is_last) -> the parameters outside the layers."""
        found = {}
        for first, last in product((False, True), repeat=2):
            without_layers = Chunk(0, 0, 0, 0, is_first=first, is_last=last)
            found[first, last] = chunk_share(self.elements, self.config, without_layers)
        return found
