"""The parameters of adapters: names, shapes, and the ranks that share them. `plan` counts them without torch."""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from math import prod
from typing import NamedTuple

from formats.tensor import Box
from megaconv.model.natives import NativeTensor, Region
from megatron_lite.models.lora.shares import Share
from megatron_lite.parallel.parameter_kinds import Declaration, Kind
from megatron_lite.settings.options import LoRA

MAGNITUDE = ".magnitude"
"""End of the names of magnitudes: the lengths of a module's rows, which DoRA trains."""
MAGNITUDE_VECTOR = "lora_magnitude_vector"
"""peft's word for them."""


class Sharding(Enum):
    """Sharding of a matrix. The values are the kinds of its adapter's A and B. Magnitudes are sharded as the rows of B."""

    COLUMNS = Kind.OF_TOKENS, Kind.SHARDED
    ROWS = Kind.SHARDED, Kind.OF_TOKENS
    EXPERTS = Kind.EXPERT, Kind.EXPERT
    NOT_AT_ALL = Kind.OF_TOKENS, Kind.OF_TOKENS


def adapter_parameters(
    path: str, shares: Sequence[Share], sharding: Sharding, options: LoRA
) -> Iterator[tuple[NativeTensor, Declaration]]:
    """Yield A [rank, in] and B [out, rank] of each module's share, and with DoRA its magnitude [out].

    path: of the matrix in the chunk.
    """
    of_a, of_b = (Declaration(kind) for kind in sharding.value)
    # As in peft. In 16 bits, a magnitude would hardly move: it is large beside its changes.
    of_magnitude = Declaration(of_b.kind, in_float32=True)
    for share in shares:
        pair = f"{path}.adapter.pairs.{share.module.key}"
        yield _a(f"{pair}.lora_a", share, options.rank, of_a), of_a
        yield _of_rows(f"{pair}.lora_b", share, "lora_B.weight", (options.rank,), of_b), of_b
        if options.dora:
            yield _of_rows(pair + MAGNITUDE, share, MAGNITUDE_VECTOR, (), of_b), of_magnitude


def _a(name: str, share: Share, rank: int, declaration: Declaration) -> NativeTensor:
    """Return A of a share: [rank, in]."""
    regions = (Region(Box(0, rank, *share.columns), 0),)
    parts = {f"{share.module.name}.lora_A.weight": regions}
    return NativeTensor(name, parts, (rank, share.width), declaration.kind.copied)


def _of_rows(
    name: str, share: Share, end: str, axes: tuple[int, ...], declaration: Declaration
) -> NativeTensor:
    """Return a tensor with an element of shape `axes` for each row of a share. end: of the name of the module's tensor."""
    regions, row = [], 0
    for run in share.rows:
        box = Box(run.whole, run.whole + run.size, 0, prod(axes))
        regions.append(Region(box, row))
        row += run.size
    parts = {f"{share.module.name}.{end}": tuple(regions)}
    return NativeTensor(name, parts, (share.out, *axes), declaration.kind.copied)


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
