"""Native tensors as rectangles of canonical tensors. `natives.py` builds them from a table; loaders and savers need
nothing else.

A region is a rectangle of a canonical tensor, and its place in a native tensor. Its order says how the native tensor
stores the rectangle's elements. Each order is a class that reads and writes blocks of a region.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape


class NativeOutput(Protocol):
    """A native tensor that is being written."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        ...

    def write(self, box: Box, rows: Bytes) -> None:
        """Write a rectangle of the native tensor. rows: [box.rows, box.cols * itemsize], each row contiguous."""
        ...

    def scratch(self, box: Box) -> Bytes:
        """A buffer for a rectangle of the native tensor. The next call returns the same memory."""
        ...


@dataclass(frozen=True)
class Order:
    """The order of a region's elements in a native tensor. This class keeps the order of the canonical tensor.

    A subclass is another order. Its `read` and `write` are inverses of each other, for any block of the region.
    """

    transposed: ClassVar[bool] = False
    """True if rows of the canonical tensor are columns of the native tensor."""

    @property
    def together(self) -> int:
        """Number of consecutive rows that change places among each other. A region has a multiple of it."""
        return 1

    def read(self, region: "Region", wanted: Box, native: LazyTensor, out: Bytes) -> None:
        """Read a rectangle of the canonical tensor from a native tensor. wanted: a rectangle inside region.box."""
        native.read_into(region.in_native(wanted), out)

    def write(self, region: "Region", wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        """Write a rectangle of the canonical tensor to a native tensor. rows: its elements, in canonical order."""
        native.write(region.in_native(wanted), rows)

    def native_rows(self, region: "Region", rows: range) -> Sequence[int]:
        """Return the row of the native tensor that stores each of these rows of the canonical tensor."""
        down = region.row - region.box.row0
        return range(rows.start + down, rows.stop + down)

    def filled(self, region: "Region") -> Iterator[Box]:
        """Yield the rectangles of the native tensor that a region fills."""
        yield region.in_native(region.box)


PLAIN = Order()


@dataclass(frozen=True)
class Repeated(Order):
    """A single row that is stored several times, as padding of a vocabulary. Reading returns the first copy."""

    times: int

    def write(self, region: "Region", wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        row0, _, col0, col1 = region.in_native(wanted)
        for row in range(row0, row0 + self.times):
            native.write(Box(row, row + 1, col0, col1), rows)

    def filled(self, region: "Region") -> Iterator[Box]:
        first = region.in_native(region.box)
        yield first._replace(row1=first.row0 + self.times)


class Region(NamedTuple):
    """A rectangle of a canonical tensor, and the place of its first element in the native tensor.

    Rectangles that are not transposed are as wide as the native tensor.
    """

    box: Box
    row: int
    col: int = 0
    order: Order = PLAIN

    @property
    def transposed(self) -> bool:
        """True if rows of the canonical tensor are columns of the native tensor."""
        return self.order.transposed

    def in_native(self, wanted: Box) -> Box:
        """The rectangle of the native tensor that holds a rectangle of the canonical tensor in plain order."""
        down, right = self.row - self.box.row0, self.col - self.box.col0
        return Box(wanted.row0 + down, wanted.row1 + down, wanted.col0 + right, wanted.col1 + right)


class Copy(NamedTuple):
    """A native tensor with the same content as another tensor of the same checkpoint. A source may lack it."""

    written: bool
    """True if such a checkpoint should contain the copy. Savers then write it."""
    used: bool = True
    """True if the model uses the copy. The content of an unused copy means nothing."""
    must_equal: bool = False
    """True if the copy is trained separately. A copy with other values then is another model."""


class NativeTensor(NamedTuple):
    """One tensor of a checkpoint file, and the rectangles of canonical tensors that it consists of."""

    name: str
    parts: Mapping[str, tuple[Region, ...]]
    """Canonical name -> the rectangles of that tensor."""
    shape: Shape
    replicated: bool = False
    """True if every tensor-parallel rank holds the same tensor."""
    tp: int | None = None
    """The axis that tensor parallelism or expert tensor parallelism shards; None if the axis is not sharded."""
    groups: int | None = None
    """Number of groups of the whole tensor, if it is joined by groups. A rank holds some of the groups. If there are
    more ranks than groups, it holds an even share of the rows."""
    copy: Copy | None = None
    """Set if the tensor is a second copy."""
    of_experts: bool = False
    """True if the tensor belongs to experts: one expert-parallel rank holds it, and other ranks hold other experts."""
    padding_rows: int = 0
    """Rows at the end that belong to no canonical tensor."""
    view: tuple[int, int] | None = None
    """Shape of the matrix in which regions count rows and columns, if it differs from that of `shape`."""
    shift: int = 0
    """The number that was added to the canonical elements."""

    def only_region(self) -> tuple[str, Region]:
        """(name, region) of a tensor that consists of one region."""
        ((name, (region,)),) = self.parts.items()
        return name, region

    def in_order(self, order: Order) -> "NativeTensor":
        """The same regions with their elements in another order."""
        parts = {
            name: tuple(region._replace(order=order) for region in regions)
            for name, regions in self.parts.items()
        }
        return self._replace(parts=parts)

    def with_padding(self, regions: tuple[Region, ...], vocab: int) -> tuple[Region, ...]:
        """A part's regions, and the last row of the vocabulary again in each padding row."""
        if not self.padding_rows:
            return regions
        rows, columns = matrix_shape(self.shape)
        last_row = Box(vocab - 1, vocab, 0, columns)
        order = Repeated(self.padding_rows)
        return (*regions, Region(last_row, rows - self.padding_rows, order=order))
