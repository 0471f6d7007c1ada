"""Lazy tensors: a shape, a dtype, and a method that reads any rectangle into a buffer of the caller.

Every tensor is treated as a matrix of elements. A tensor of shape [a, b, c] has a*b rows and c columns, a vector [n]
has n rows and one column, and a scalar is 1 by 1. Moving, sharding and joining tensors is then copying rectangles,
which needs only bytes. Dtypes are torch's names, and buffers are arrays of bytes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from formats.ceilings import AXES, AXIS
from formats.entry_check import Entry, EntryCheck
from formats.errors import CorruptCheckpoint
from formats.file_limit import is_limit, limit_reached
from formats.input_file import InputFile as InputFile
from formats.lazy_numpy import Bytes as Bytes
from formats.lazy_numpy import np
from formats.regular_files import open_regular
from formats.wording import brief

Shape = tuple[int, ...]

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Dtype name -> bytes per element."""


class Box(NamedTuple):
    """A rectangle of a matrix, half open: rows row0..row1, columns col0..col1."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row1 - self.row0

    @property
    def cols(self) -> int:
        """Number of columns, in elements."""
        return self.col1 - self.col0


def whole_groups(box: Box, group: int) -> Box:
    """The smallest rectangle of whole groups of a row that holds a rectangle."""
    return box._replace(col0=box.col0 // group * group, col1=-(-box.col1 // group) * group)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """(rows, columns) of a tensor as a matrix: the last axis is the columns, and a vector is one column."""
    if len(shape) == 1:
        return shape[0], 1
    return prod(shape[:-1]), shape[-1] if shape else 1


def as_shape(sizes: object) -> Shape:
    """A shape, offset or strides from a file, as a tuple. Raises ValueError unless it is a list or tuple of natural
    numbers."""
    if not isinstance(sizes, (list, tuple)) or len(sizes) > AXES:
        raise ValueError(f"{brief(sizes)} is not a list of at most {AXES} numbers")
    for size in sizes:
        if type(size) is not int or not 0 <= size < AXIS:
            raise ValueError(f"{brief(list(sizes))}: sizes and offsets must be natural numbers")
    return tuple(sizes)


def byte_count(shape: Shape, dtype: str) -> int:
    """Size in bytes of a tensor without gaps."""
    return prod(shape) * ITEMSIZE[dtype]


class LazyTensor(Protocol):
    """A tensor from a loader. Nothing is read until somebody asks for a rectangle."""

    @property
    def shape(self) -> Shape:
        """Shape as in torch; () for a single number."""
        ...

    @property
    def dtype(self) -> str:
        """torch's name of the dtype, such as `bfloat16`."""
        ...

    def read_into(self, box: Box, out: Bytes) -> None:
        """Fill out [box.rows, box.cols * itemsize] (bytes; rows may be strided, each row is contiguous).

        Raises CorruptCheckpoint if the file no longer holds the promised data.
        """
        ...


Part = tuple[float, float]
"""A part of a tensor, from a share of its bytes to another: (0.0, 1.0) is all of it."""
WHOLE: Part = (0.0, 1.0)


def announce(tensor: LazyTensor, part: Part = WHOLE) -> None:
    """Tell that a part of a tensor will be read soon, and the rest later. Bytes in a store are fetched ahead, if the tensor
    says where they are.
    """
    method = getattr(tensor, "announce", None)
    if method is not None:
        method(part)


def announce_in_step(tensors: Sequence[LazyTensor]) -> None:
    """Announce tensors that will be read in step: of all of them the first share, then the second one, and so on."""
    nbytes = sum(byte_count(tensor.shape, tensor.dtype) for tensor in tensors)
    count = -(-nbytes // _STEP_BYTES) if len(tensors) > 1 else 1
    for number in range(count):
        for tensor in tensors:
            announce(tensor, (number / count, (number + 1) / count))


_STEP_BYTES = 32 << 20
"""Bytes of a share of all tensors that are read in step."""


def row_blocks(shape: Shape, dtype: str, block_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most block_bytes (and at least one element) that cover a tensor in row-major order, front to
    back."""
    rows, cols = matrix_shape(shape)
    return box_blocks(Box(0, rows, 0, cols), dtype, block_bytes)


def box_blocks(box: Box, dtype: str, block_bytes: int) -> Iterator[Box]:
    """Yield such boxes for a rectangle of a tensor."""
    if not box.rows or not box.cols:
        return
    block_elements = max(1, block_bytes // ITEMSIZE[dtype])
    if box.cols <= block_elements:
        step = block_elements // box.cols
        for row in range(box.row0, box.row1, step):
            yield Box(row, min(row + step, box.row1), box.col0, box.col1)
    else:
        for row in range(box.row0, box.row1):
            for col in range(box.col0, box.col1, block_elements):
                yield Box(row, row + 1, col, min(col + block_elements, box.col1))


@dataclass(frozen=True)
class FileTensor:
    """A contiguous tensor somewhere in a file."""

    file: InputFile
    offset: int
    shape: Shape
    dtype: str
    check: EntryCheck | None = field(default=None, compare=False, repr=False)
    """The check of the zip entry that holds the tensor, if the entry has a checksum."""

    def __post_init__(self) -> None:
        is_possible = self.offset >= 0 and min(self.shape, default=0) >= 0
        _, end = self._span
        if not is_possible or end > self.file.size:
            raise CorruptCheckpoint(
                f"{self.file.path}: a tensor {list(self.shape)} of {self.dtype} at byte {self.offset} "
                f"reaches past the end of the file ({self.file.size} bytes); is the file complete?",
                code="truncated-file",
            )

    @property
    def _span(self) -> tuple[int, int]:
        return self.offset, self.offset + byte_count(self.shape, self.dtype)

    def announce(self, part: Part) -> None:
        """Have the bytes of a part fetched ahead."""
        start, end = self._span
        first, last = (start + int(share * (end - start)) for share in part)
        self.file.announce((first, last))

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        _, cols = matrix_shape(self.shape)
        start = self.offset + (box.row0 * cols + box.col0) * itemsize
        span = self._span
        # Whole rows, or a part of one row, are contiguous in the file: one read is enough.
        if box.cols == cols or box.rows == 1:
            whole = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
            self.file.read_into(start, whole, span)
            if self.check is not None:
                self.check.add(start, whole)
            if whole is not out:
                np.copyto(out, whole)
            return
        if self.check is not None:
            # The rows are scattered: the entry's checksum is compared after the rest of the entry has been read.
            self.check.touch()
        for row in range(box.rows):
            self.file.read_into(start + row * cols * itemsize, out[row], span)


@dataclass(frozen=True)
class StridedTensor:
    """A tensor whose elements are not contiguous, such as a saved transposed view.

    It is read through a memory map, so that a scattered row needs no buffer as large as the tensor.
    """

    file: InputFile
    offset: int
    shape: Shape
    dtype: str
    strides: Shape
    """Strides in elements, one per axis."""
    check: EntryCheck | None = field(default=None, compare=False, repr=False)
    """The check of the zip entry that holds the tensor, if the entry has a checksum."""

    def __post_init__(self) -> None:
        end = self.offset + self._extent * ITEMSIZE[self.dtype]
        if min(self.strides) < 0 or end > self.file.size:
            raise CorruptCheckpoint(
                f"{self.file.path}: a strided tensor {list(self.shape)} reaches past the end of the file"
            )
        axes = zip(self.shape, self.strides, strict=True)
        is_expanded = any(size > 1 and stride == 0 for size, stride in axes)
        if is_expanded:
            raise CorruptCheckpoint(
                f"{self.file.path}: an expanded tensor {list(self.shape)} (stride 0); save it with .contiguous()"
            )

    @property
    def _extent(self) -> int:
        """Number of elements from the first to the last one, gaps included."""
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )

    def read_into(self, box: Box, out: Bytes) -> None:
        if self.check is not None:
            self.check.touch()  # the elements are scattered
        view = self._view()
        if len(self.shape) == 1:
            out[:] = view[box.row0 : box.row1]
            return
        for row in range(box.rows):
            index = np.unravel_index(box.row0 + row, self.shape[:-1])
            out[row] = view[index][box.col0 : box.col1].reshape(-1)

    def _view(self) -> Bytes:
        """The tensor's bytes, mapped from the file: [*shape, itemsize]."""
        itemsize = ITEMSIZE[self.dtype]
        byte_strides = [stride * itemsize for stride in self.strides]
        nbytes = self._extent * itemsize
        self.file.require(self.offset, self.offset + nbytes)
        try:
            with os.fdopen(open_regular(self.file.path, holes=True), "rb") as file:
                flat = np.memmap(file, np.uint8, "r", self.offset, (nbytes,))
        except (OSError, ValueError) as error:
            if is_limit(error):
                raise limit_reached(self.file.path) from error
            raise CorruptCheckpoint(
                f"{self.file.path}: can't be read any more ({error}); was it changed?"
            ) from error
        return np.lib.stride_tricks.as_strided(
            flat,
            shape=(*self.shape, itemsize),
            strides=(*byte_strides, 1),
            writeable=False,
        )


@dataclass(frozen=True)
class ComputedTensor:
    """The shape and the dtype of a tensor whose values are computed from another tensor's."""

    source: LazyTensor

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def announce(self, part: Part) -> None:
        """Have the bytes of a part of the other tensor fetched ahead."""
        announce(self.source, part)


@dataclass(frozen=True)
class ReshapedTensor:
    """Another tensor's elements, in their row-major order, in another shape."""

    source: LazyTensor
    shape: Shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def announce(self, part: Part) -> None:
        """Have the bytes of a part of the other tensor fetched ahead."""
        announce(self.source, part)

    def read_into(self, box: Box, out: Bytes) -> None:
        cols, stored_cols = matrix_shape(self.shape)[1], matrix_shape(self.source.shape)[1]
        if cols == stored_cols:
            self.source.read_into(box, out)
            return
        for index in range(box.rows):
            first = (box.row0 + index) * cols + box.col0
            self._read_run(first, first + box.cols, stored_cols, out[index])

    def _read_run(self, first: int, last: int, stored_cols: int, out: Bytes) -> None:
        """Read elements first to last: the rest of a stored row, whole rows, and the beginning of one more row."""
        itemsize, start = ITEMSIZE[self.dtype], first
        while start < last:
            row, col = divmod(start, stored_cols)
            rows = max(1, (last - start) // stored_cols) if col == 0 else 1
            cols = min(stored_cols - col, last - start)
            stop = start + rows * cols
            part = out[(start - first) * itemsize : (stop - first) * itemsize]
            self.source.read_into(
                Box(row, row + rows, col, col + cols), part.reshape(rows, cols * itemsize)
            )
            start = stop


def reshaped(tensor: LazyTensor, shape: Shape) -> LazyTensor:
    """A tensor in another shape, with the same number of elements in the same row-major order."""
    if isinstance(tensor, FileTensor):
        return replace(tensor, shape=shape)
    return ReshapedTensor(tensor, shape)


def number(value: Any) -> Any:
    """A tensor of one element as a Python number; every other value unchanged. Raises ValueError for more elements."""
    if not hasattr(value, "read_into"):
        return value
    if prod(value.shape) != 1 or value.dtype not in ("float32", "float64", "int64", "int32"):
        raise ValueError(f"a number was expected, found {value.dtype} {list(value.shape)}")
    return read_tensor(value).view(np.dtype(value.dtype)).reshape(-1)[0].item()


def check_later(entries: Iterable[Entry]) -> None:
    """Schedule a checksum comparison of zip entries that another process read partly.

    It happens together with the comparison of this process's own entries.
    """
    files: dict[str, InputFile] = {}
    for entry in entries:
        if entry.path not in files:
            files[entry.path] = InputFile.open(Path(entry.path))
        files[entry.path].checked(entry.start, entry.size, entry.crc).touch()


def read_tensor(tensor: LazyTensor) -> Bytes:
    """The whole tensor as bytes [rows, cols * itemsize]; for small tensors and tests."""
    rows, cols = matrix_shape(tensor.shape)
    out = np.empty((rows, cols * ITEMSIZE[tensor.dtype]), np.uint8)
    if out.size:
        tensor.read_into(Box(0, rows, 0, cols), out)
    return out
