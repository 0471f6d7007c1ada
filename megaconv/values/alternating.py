"""A tensor whose rows alternate between two others: g0 u0 g1 u1 ..."""

from dataclasses import dataclass

from formats.tensor import Box, Bytes, LazyTensor, Part, Shape, announce


@dataclass(frozen=True)
class AlternatingRows:
    """Two tensors [..., rows, cols] of one shape and dtype, as one of twice the rows that begins with a row of the first."""

    first: LazyTensor
    second: LazyTensor

    @property
    def shape(self) -> Shape:
        *outer, rows, cols = self.first.shape
        return (*outer, 2 * rows, cols)

    @property
    def dtype(self) -> str:
        return self.first.dtype

    def announce(self, part: Part) -> None:
        """Have the bytes of a part of both tensors fetched ahead."""
        announce(self.first, part)
        announce(self.second, part)

    def read_into(self, box: Box, out: Bytes) -> None:
        for number, source in enumerate((self.first, self.second)):
            row0, row1 = -(-(box.row0 - number) // 2), -(-(box.row1 - number) // 2)
            place = out[2 * row0 + number - box.row0 :: 2]
            if row0 < row1:
                source.read_into(box._replace(row0=row0, row1=row1), place)
