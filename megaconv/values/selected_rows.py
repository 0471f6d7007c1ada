"""Some rows of a matrix or a vector."""

from dataclasses import dataclass

from formats.tensor import Box, Bytes, ComputedTensor, Shape


@dataclass(frozen=True)
class SelectedRows(ComputedTensor):
    """Rows of another tensor (`source`), which has one or two axes."""

    rows: tuple[int, ...]
    """Their numbers in the other tensor, in the order of this one."""

    @property
    def shape(self) -> Shape:
        return (len(self.rows), *self.source.shape[1:])

    def read_into(self, box: Box, out: Bytes) -> None:
        for index, row in enumerate(self.rows[box.row0 : box.row1]):
            stored = Box(row, row + 1, box.col0, box.col1)
            self.source.read_into(stored, out[index : index + 1])
