"""Some rows of a lazy tensor as a tensor."""

from dataclasses import dataclass

from formats.tensor import Box, Bytes, LazyTensor, Part, Shape, announce


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix."""

    source: LazyTensor
    first: int
    count: int

    @property
    def shape(self) -> Shape:
        return self.count, *self.source.shape[1:]

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def announce(self, part: Part) -> None:
        """Have the bytes of a part fetched ahead."""
        begin, end = (self.first + share * self.count for share in part)
        total = self.source.shape[0] or 1
        announce(self.source, (begin / total, end / total))

    def read_into(self, box: Box, out: Bytes) -> None:
        self.source.read_into(
            box._replace(row0=box.row0 + self.first, row1=box.row1 + self.first), out
        )
