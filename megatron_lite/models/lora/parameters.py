"""The parameters of adapters: names, shapes, and the ranks that share them. `plan` counts them without torch."""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from formats.tensor import Box
from megaconv.model.natives import NativeTensor, Region
from megatron_lite.models.lora.shares import Share
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.settings.options import LoRA


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


class Rows(NamedTuple):
    """The trained rows of one embedding or head."""

    matrix: NativeTensor
    tokens: tuple[int, ...]
    rows: NativeTensor
    """[tokens, hidden]."""


def row_parameters(natives: Iterable[NativeTensor], options: LoRA) -> Iterator[Rows]:
    """Yield the trained rows of each embedding and head in a chunk that has some. natives: the chunk's own parameters."""
    for matrix in natives:
        path, _, last = matrix.name.rpartition(".")
        tokens = options.tokens_of(path) if last == "weight" else ()
        if tokens:
            yield Rows(matrix, tokens, _rows_of(matrix, tokens))


def _rows_of(matrix: NativeTensor, tokens: Sequence[int]) -> NativeTensor:
    ((canonical, _),) = matrix.parts.items()
    owner = matrix.name.partition(".")[0]
    shape = len(tokens), matrix.shape[1]
    parts = {rows_name(canonical): (Region(Box(0, shape[0], 0, shape[1]), 0),)}
    name = f"{owner}.token_rows.rows"
    return NativeTensor(name, parts, shape, replicated=True, copy=matrix.copy)


def rows_name(canonical: str) -> str:
    """Return the name of trained rows. canonical: of the whole matrix."""
    return f"{canonical}.token_rows"


def _regions_of_b(share: Share, rank: int) -> tuple[Region, ...]:
    """Return the rows of the module's B that a share has."""
    regions, row = [], 0
    for run in share.rows:
        regions.append(Region(Box(run.whole, run.whole + run.size, 0, rank), row))
        row += run.size
    return tuple(regions)
