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
    kind_of_a, kind_of_b = sharding.value
    for share in shares:
        place, module = f"{path}.adapter.pairs.{share.module.key}", share.module.name
        a = {f"{module}.lora_A.weight": (Region(Box(0, rank, *share.columns), 0),)}
        b = {f"{module}.lora_B.weight": _regions_of_b(share, rank)}
        yield NativeTensor(f"{place}.lora_a", a, (rank, share.width), kind_of_a.copied), kind_of_a
        yield NativeTensor(f"{place}.lora_b", b, (share.out, rank), kind_of_b.copied), kind_of_b


def _regions_of_b(share: Share, rank: int) -> tuple[Region, ...]:
    """Return the rows of the module's B that a share has."""
    regions, row = [], 0
    for run in share.rows:
        regions.append(Region(Box(run.whole, run.whole + run.size, 0, rank), row))
        row += run.size
    return tuple(regions)
