"""The tensors that a quantized matrix becomes: its codes, and the scales of groups of its elements.

A block of codes is computed once for two results: the bytes that are stored, and the numbers that a reader of the output
gets, which are fingerprinted. A reader gets no scales.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import sqrt
from threading import Lock
from typing import NamedTuple

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, box_blocks, whole_groups
from megaconv.model.assembled import window
from megaconv.model.ir import TensorInfo
from megaconv.values.rounding import rounded

READ_AS = "bfloat16"
"""The dtype that a reader dequantizes a weight to by default."""
AT_ONCE = 1 << 17
"""Elements per step of arithmetic: intermediate results then stay small."""


@dataclass
class Rounding:
    """The rounding error of all values that were read so far. Any thread may add to it."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, errors: Floats) -> None:
        largest = float(np.abs(errors).max(initial=0))
        squares = float(np.square(errors, dtype=np.float64).sum())
        with self._lock:
            self.largest, self.squares = max(self.largest, largest), self.squares + squares
            self.count += errors.size

    @property
    def rms(self) -> float:
        return sqrt(self.squares / self.count) if self.count else 0.0

    def to_json(self) -> dict[str, float]:
        return {"weights": self.count, "largest_error": self.largest, "rms_error": self.rms}


class Quantized(NamedTuple):
    """The codes of a rectangle of elements."""

    codes: Bytes
    """[rows, bytes], as they are stored."""
    values: Floats
    """[rows, columns]: the numbers that a reader gets, before they are rounded to its dtype."""
    errors: Floats
    """The differences from the original numbers, in any shape."""


class Codes(ABC):
    """The codes of a matrix as a tensor."""

    errors: Rounding
    """The rounding errors of all that was read."""
    rows_per_row: int = 1
    """Rows of the matrix in a row of codes."""

    @property
    @abstractmethod
    def source(self) -> LazyTensor:
        """The original matrix."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of the tensor of codes."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a row of codes for each column of the matrix."""

    @property
    @abstractmethod
    def group(self) -> int:
        """Columns of the matrix that are quantized together."""

    @abstractmethod
    def quantized(self, box: Box) -> Quantized:
        """Quantize a rectangle of the matrix, of whole groups. Raises NotExpressible for a value that has no code."""

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor after dequantization."""
        return TensorInfo(self.source.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns the dequantized bytes, from which fingerprints are computed."""
        dtype = self.read.dtype
        width, itemsize = ITEMSIZE[self.dtype], ITEMSIZE[dtype]
        elements = self._elements(box)
        read = np.empty((elements.rows, elements.cols * itemsize), np.uint8)
        for part in box_blocks(box, self.dtype, AT_ONCE * self.bits // 8 // self.rows_per_row):
            wanted = self._elements(part)
            whole = whole_groups(wanted, self.group)
            found = self.quantized(whole)
            self.errors.add(found.errors)
            codes = window(found.codes, self._codes(whole), part, width)
            np.copyto(window(out, box, part, width), codes)
            values = found.values[:, wanted.col0 - whole.col0 : wanted.col1 - whole.col0]
            numbers = rounded(np.ascontiguousarray(values), dtype)
            np.copyto(window(read, elements, wanted, itemsize), numbers)
        return read

    def _elements(self, box: Box) -> Box:
        """The elements of the matrix whose codes lie in a rectangle of codes."""
        width = 8 * ITEMSIZE[self.dtype]
        return Box(
            box.row0 * self.rows_per_row,
            box.row1 * self.rows_per_row,
            box.col0 * width // self.bits,
            -(-box.col1 * width // self.bits),
        )

    def _codes(self, box: Box) -> Box:
        """The rectangle of codes of whole groups of the matrix."""
        width = 8 * ITEMSIZE[self.dtype]
        return Box(
            box.row0 // self.rows_per_row,
            box.row1 // self.rows_per_row,
            box.col0 * self.bits // width,
            box.col1 * self.bits // width,
        )


class Unread(ABC):
    """A stored tensor that a reader of the output doesn't get, because it belongs to codes."""

    @abstractmethod
    def read_into(self, box: Box, out: Bytes) -> None:
        """Read a rectangle."""

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read a rectangle. Returns the bytes that a reader gets: none."""
        self.read_into(box, out)
        return out[:0]


class Scales(Unread):
    """The scales of a matrix as a tensor, one for each group of a row."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of a scale."""

    @property
    @abstractmethod
    def group(self) -> int:
        """Columns of the matrix that share a scale."""

    @abstractmethod
    def scales(self, box: Box) -> Bytes:
        """The stored scales [rows, groups * itemsize] of a rectangle of the matrix, of whole groups.

        Raises NotExpressible for a value that has no code.
        """

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in box_blocks(box, self.dtype, AT_ONCE // self.group * itemsize):
            first, last = part.col0 * self.group, part.col1 * self.group
            scales = self.scales(part._replace(col0=first, col1=last))
            np.copyto(window(out, box, part, itemsize), scales)


def largest_of_groups(numbers: Floats) -> Floats:
    """The largest magnitude of each group: [..., size] -> [..., 1]. size: a power of two. NaN counts as the largest."""
    found = np.abs(numbers)
    # Halves of all groups at once are compared much faster than the few elements of each group.
    while found.shape[-1] > 1:
        half = found.shape[-1] // 2
        found = np.maximum(found[..., :half], found[..., half:])
    return found
