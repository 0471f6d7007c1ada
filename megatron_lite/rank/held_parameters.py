"""The parameters that a rank holds, whole or one portion at a time if data-parallel ranks share them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from megatron_lite.models.network_interface import Network
from megatron_lite.optimizer.chunk_buckets import ChunkBuckets
from megatron_lite.parallel.parameter_kinds import ParametersFreed
from megatron_lite.parallel.parameters import ParameterInfo


class RankParameters:
    """Access to the parameters of a rank's chunks. The engine sets the attributes."""

    chunks: Sequence[Network]
    """Virtual stages in order. Parameters have Megatron core's names; layers count from 0 in each chunk."""
    infos: Sequence[Sequence[ParameterInfo]]
    """The parameters of each chunk."""
    buckets: list[ChunkBuckets]
    shards_parameters: bool
    """True if parameters exist only around their use: see portions() and parameters()."""
    _keeps_whole = False
    """True inside whole_parameters()."""

    def parameters(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (chunk, name, local tensor) of every parameter of this rank, including tied copies.

        Collective if parameters are sharded (shards_parameters). Then each tensor exists only until the next one.
        """
        for number, (module, infos) in enumerate(zip(self.chunks, self.infos, strict=True)):
            listed = self.buckets[number].one_by_one(infos) if self.shards_parameters else infos
            for info in listed:
                yield info.chunk, info.name, module.get_parameter(info.name).detach()

    def lasting(self, tensor: Tensor) -> Tensor:
        """Return a tensor of parameters() that stays: itself, or a copy in main memory if parameters are sharded."""
        return tensor.to("cpu", copy=True) if self.shards_parameters else tensor

    def portions(self) -> Iterator[list[tuple[ParameterInfo, Tensor]]]:
        """Yield all parameters of this rank with their local tensors, to fill them portion by portion.

        There is one portion, or one for each bucket if parameters are sharded.
        """
        found: list[tuple[ParameterInfo, Tensor]] = []
        for number, (module, infos) in enumerate(zip(self.chunks, self.infos, strict=True)):
            listed = self.buckets[number].portions(infos) if self.shards_parameters else [infos]
            for portion in listed:
                found += [(info, module.get_parameter(info.name).detach()) for info in portion]
                if self.shards_parameters:
                    yield found
                    found = []
        if found:
            yield found

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Keep whole parameters in memory in this region. Collective if parameters are sharded."""
        outside = not self._keeps_whole
        with ExitStack() as regions:
            for buckets in self.buckets:
                regions.enter_context(buckets.whole())
            self._keeps_whole = True
            try:
                yield
            finally:
                self._keeps_whole = not outside

    def require_whole_parameters(self) -> None:
        """Raise ParametersFreed if parameters are sharded, outside whole_parameters()."""
        if self.shards_parameters and not self._keeps_whole:
            raise ParametersFreed
