"""The parameters of adapters: names, shapes, and the ranks that share them. `plan` counts them without torch."""

from collections.abc import Iterator, Sequence
from enum import Enum

from formats.tensor import Box
from megaconv.model.natives import NativeTensor, Region
from megatron_lite.models.lora.shares import Share
from megatron_lite.parallel.parameter_kinds import Kind


class Sharding(Enum):
    """Sharding of a matrix. The values are the kinds of its adapter's A and B."""

    COLUMNS = Kind.OF_TOKENS, Kind.SHARDED
    ROWS = Kind.SHARDED, Kind.OF_TOKENS
    EXPERTS = Kind.EXPERT, Kind.EXPERT
    NOT_AT_ALL = Kind.OF_TOKENS, Kind.OF_TOKENS


def adapter_parameters(
    path: str, shares: Sequence[Share], sharding: Sharding, rank: int
) -> Iterator[tuple[NativeTensor, Kind]]:
    """Yield A [rank, in] and B [out, rank] of each module's share. path: of the matrix in the chunk."""
    for share in shares:
        place = f"{path}.adapter.pairs.{share.module.key}"
        a = (Region(Box(0, rank, *share.columns), 0),)
        b, row = [], 0
        for run in share.rows:
            b.append(Region(Box(run.whole, run.whole + run.size, 0, rank), row))
            row += run.size
        of_a = ("lora_a", "lora_A", a, (rank, share.width))
        of_b = ("lora_b", "lora_B", tuple(b), (share.out, rank))
        for kind, (name, end, regions, shape) in zip(sharding.value, (of_a, of_b), strict=True):
            parts = {f"{share.module.name}.{end}.weight": regions}
            yield NativeTensor(f"{place}.{name}", parts, shape, kind.copied), kind
