"""The ranks of the run that saved a distributed checkpoint, and the parameters of each in the optimizer's order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaconv.families import family
from megaconv.megatron.optimizer.plan import once
from megaconv.megatron.optimizer.rank import Parameter
from megaconv.megatron.optimizer.shared_embeddings import is_shared, shared_tensors
from megaconv.megatron.states.names import BUFFERS, core_order
from megaconv.megatron.states.ranks import RankId
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import Naming
from megaconv.model.natives import NativeTensor, native_tensors


@dataclass(frozen=True)
class SavedRanks:
    """The ranks of the run that saved a checkpoint, and the share of the model on each."""

    config: ModelConfig
    layout: Layout
    padded: int
    naming: Naming
    dtypes: Mapping[str, str]
    """The weights' dtypes by canonical name."""

    def numbers(self) -> Iterator[RankId]:
        """The ranks that hold tensors which no other rank holds."""
        for pp_rank in range(self.layout.pp):
            for ep_rank in range(self.layout.ep):
                yield from (RankId(tp_rank, pp_rank, ep_rank) for tp_rank in range(self.layout.tp))

    def natives(self, rank: RankId) -> list[tuple[Parameter, NativeTensor]]:
        """The parameters of a rank, in the order of its modules."""
        embeddings = shared_tensors(self.config, self.layout.pp)
        found = []
        for chunk in self.layout.chunks():
            if chunk.pp_rank != rank.pp:
                continue
            for native in self._of_chunk(chunk, rank):
                shared = is_shared(native, embeddings, self.config)
                dtype = self.dtypes[next(iter(native.parts))]
                found.append(
                    (Parameter(chunk.vpp_rank, native.name, native.shape, dtype, shared), native)
                )
        return found

    def _of_chunk(self, chunk: Chunk, rank: RankId) -> list[NativeTensor]:
        rows = family(self.config.family).rows
        natives = native_tensors(
            rows, self.config, self.naming, self.layout, rank.tp, chunk, self.padded, rank.ep
        )
        kept = [
            native
            for native in natives
            if (native.copy is None or native.copy.written) and not native.name.endswith(BUFFERS)
        ]
        order = core_order(rows, self.naming)
        return once(sorted(kept, key=lambda native: order(native.name)))
