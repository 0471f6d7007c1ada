"""A canonical tensor with a separate axis for the heads, as in GGUF's latent attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.tensor import Box, matrix_shape
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.spellings.separate import Separate
from megaconv.model.spellings.transposed import AS_COLUMNS


@dataclass(frozen=True)
class PerHead(Separate):
    """A canonical tensor [heads*rows, cols] with a separate axis for the heads: [heads, rows, cols]."""

    transposed: bool = False
    """True if each head is stored as its transpose, [heads, cols, rows]."""

    def refusal(self, tp: int | None) -> str:
        return (
            "" if tp == 0 else "a rank has its own share of the heads, so that PerHead needs tp 0"
        )

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        rows, cols = matrix_shape(native.shape)
        heads = rank.sizes["heads"]
        step = rows // heads
        if not self.transposed:
            return native._replace(shape=(heads, step, cols))
        name, whole = native.only_region()
        regions = tuple(_transposed_heads(whole.box, step))
        return native._replace(parts={name: regions}, shape=(heads, cols, step))


def _transposed_heads(box: Box, step: int) -> Iterator[Region]:
    """Yield the region of each head of `step` rows: all columns of the first head, then those of the second, ..."""
    for head, row0 in enumerate(range(box.row0, box.row1, step)):
        rows = box._replace(row0=row0, row1=row0 + step)
        yield Region(rows, head * box.cols, order=AS_COLUMNS)
