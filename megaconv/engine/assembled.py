"""A canonical tensor put together from rectangles of native ones: what a loader streams."""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.training import MASTER, ParamGroup

_log = logging.getLogger("megaconv")


class Copy(NamedTuple):
    """A second copy of the whole tensor, or of the part that `source` holds, which has to equal the first."""

    part: "Part"
    description: str
    strict: bool
    """Whether a difference is an error; otherwise it is reported and the first copy wins."""


class Part(NamedTuple):
    """One rectangle: where it lies in the canonical tensor, and which native tensor holds it from which row on."""

    region: Region
    source: LazyTensor
    native: str = ""
    """The native tensor's name."""
    where: str = ""
    """Of which file or rank, for people."""

    def read_into(self, wanted: Box, out: Bytes) -> None:
        """wanted: inside this part's box."""
        down, right = wanted.row0 - self.region.box.row0, wanted.col0 - self.region.box.col0
        if self.region.pairs:
            for part, row in paired_rows(self.region.pairs, down, down + wanted.rows):
                self._read_pairs(part, row, wanted, out[part.start - down : part.stop - down])
            return
        if self.region.halves:
            col = self.region.col + right
            for every_second, row in halved_rows(self.region.box.rows, down, down + wanted.rows):
                rows, row = out[every_second], self.region.row + row
                self.source.read_into(Box(row, row + len(rows), col, col + wanted.cols), rows)
            return
        if self.region.row_step > 1:
            self._read_spaced(down, right, wanted, out)
            return
        if not self.region.transposed:
            row, col = self.region.row + down, self.region.col + right
            self.source.read_into(Box(row, row + wanted.rows, col, col + wanted.cols), out)
            return
        row, col = self.region.row + right, self.region.col + down
        itemsize = ITEMSIZE[self.source.dtype]
        block = np.empty((wanted.cols, wanted.rows * itemsize), np.uint8)
        self.source.read_into(Box(row, row + wanted.cols, col, col + wanted.rows), block)
        np.copyto(out, transpose(block, itemsize))

    def _read_spaced(self, down: int, right: int, wanted: Box, out: Bytes) -> None:
        """Row by row, from native rows at a distance of row_step."""
        col = self.region.col + right
        for index in range(wanted.rows):
            row = self.region.row + (down + index) * self.region.row_step
            self.source.read_into(Box(row, row + 1, col, col + wanted.cols), out[index : index + 1])

    def _read_pairs(self, rows: range, row: int, wanted: Box, out: Bytes) -> None:
        """rows: either one, or whole heads, counted from this part's first; they lie in the source from row on."""
        col = self.region.col + wanted.col0 - self.region.box.col0
        box = Box(self.region.row + row, self.region.row + row + len(rows), col, col + wanted.cols)
        if len(rows) == 1:
            self.source.read_into(box, out)
            return
        pairs = np.empty(out.shape, np.uint8)
        self.source.read_into(box, pairs)
        heads, half, row_bytes = len(rows) // self.region.pairs, self.region.pairs // 2, out.shape[1]
        np.copyto(out.reshape(heads, 2, half, row_bytes), pairs.reshape(heads, half, 2, row_bytes).swapaxes(1, 2))


@dataclass(slots=True)
class Assembled:
    """parts cover the tensor without overlap."""

    key: Key
    shape: Shape
    dtype: str
    parts: Sequence[Part]
    copies: Sequence[Copy] = ()
    shift: int = 0
    """What the native tensors have added to the canonical values."""
    _starts: list[int] | None = field(default=None, repr=False)
    """First rows of the parts, which are sorted for it: not before a tensor is read, since a model may have very many."""
    _reported: set[str] | None = field(default=None, repr=False)

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in self._overlapping(box):
            wanted = overlap(part.region.box, box)
            if wanted is not None:
                part.read_into(wanted, window(out, box, wanted, itemsize))
        for copy in self.copies:
            wanted = overlap(copy.part.region.box, box)
            if wanted is not None:
                self._compare(copy, wanted, window(out, box, wanted, itemsize))

    def _overlapping(self, box: Box) -> Sequence[Part]:
        if len(self.parts) == 1:
            return self.parts
        if self._starts is None:
            self.parts = sorted(self.parts, key=lambda part: (part.region.box.row0, part.region.box.col0))
            self._starts = [part.region.box.row0 for part in self.parts]
        # Parts of one row range may be several (column shards), so step back to the first that starts at or before box.
        first = max(0, bisect_right(self._starts, box.row0) - 1)
        while first and self.parts[first - 1].region.box.row1 > box.row0:
            first -= 1
        return self.parts[first : bisect_right(self._starts, box.row1 - 1)]

    def _compare(self, copy: Copy, wanted: Box, expected: Bytes) -> None:
        found = np.empty(expected.shape, np.uint8)
        copy.part.read_into(wanted, found)
        if not np.array_equal(found, expected):
            if copy.strict:
                raise TensorMismatch(
                    f"{self.key}: {copy.description} has other values; the checkpoint contradicts itself"
                )
            self._reported = self._reported or set()
            if copy.description not in self._reported:
                self._reported.add(copy.description)
                _log.warning("%s: %s has other values; they are ignored", self.key, copy.description)


def transpose(rows: Bytes, itemsize: int) -> Bytes:
    """[rows, cols * itemsize] -> [cols, rows * itemsize], element by element; a copy."""
    element = np.dtype((np.void, itemsize))
    return np.ascontiguousarray(rows.view(element).T).view(np.uint8)


def paired_rows(head_dim: int, start: int, stop: int) -> Iterator[tuple[range, int]]:
    """(rows, their first row in the native tensor) of rows start to stop of a region of pairs, in order.

    Whole heads come in one range, which is a permutation of as many native rows; others row by row.
    """
    whole = range(-(-start // head_dim) * head_dim, stop // head_dim * head_dim) or range(stop, stop)
    yield from ((range(row, row + 1), _paired_row(head_dim, row)) for row in range(start, whole.start))
    if whole:
        yield whole, whole.start
    yield from ((range(row, row + 1), _paired_row(head_dim, row)) for row in range(whole.stop, stop))


def _paired_row(head_dim: int, row: int) -> int:
    head, inner = divmod(row, head_dim)
    half, index = divmod(inner, head_dim // 2)
    return head * head_dim + 2 * index + half


def halved_rows(rows: int, start: int, stop: int) -> Iterator[tuple[slice, int]]:
    """(every second of rows start to stop, counted from start; their first row in the native tensor), for either half.

    rows: of the whole region of halves.
    """
    for half in (0, 1):
        first = start + (half - start) % 2
        if first < stop:
            yield slice(first - start, stop - start, 2), half * rows // 2 + first // 2


def overlap(left: Box, right: Box) -> Box | None:
    """The rectangle that two have in common."""
    row0, row1 = max(left.row0, right.row0), min(left.row1, right.row1)
    col0, col1 = max(left.col0, right.col0), min(left.col1, right.col1)
    return Box(row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None


def window(buffer: Bytes, box: Box, wanted: Box, itemsize: int) -> Bytes:
    """The part of a buffer that holds `box` in which `wanted` lies."""
    cols = slice((wanted.col0 - box.col0) * itemsize, (wanted.col1 - box.col0) * itemsize)
    return buffer[wanted.row0 - box.row0 : wanted.row1 - box.row0, cols]


class Placed(NamedTuple):
    """A native tensor's place in the model, and the tensor that a checkpoint has there."""

    native: NativeTensor
    tensor: LazyTensor
    where: str
    """For messages: the file."""
    slots: Mapping[str, LazyTensor] = MappingProxyType({})
    """The optimizer's tensors of this parameter."""
    group: ParamGroup | None = None
    """Of the optimizer's parameter groups; None where there is no optimizer."""

    def of_slot(self, slot: str) -> "Placed":
        """The optimizer's tensor in the weight's place."""
        return self._replace(tensor=self.slots[slot], slots={})


def assemble(
    shapes: Mapping[str, Shape], placed: Iterable[Placed], *, strict: bool, slot: str = WEIGHT
) -> dict[Key, LazyTensor]:
    """Every canonical tensor from the native tensors of a whole checkpoint, in the order of `shapes`.

    slot: what they are of their parameters; slots other than weights exist of those parameters that were placed.
    Replicas on other ranks and second copies of tied embeddings are compared while the tensor is read: a difference is
    an error when strict, and reported otherwise. Raises TensorMismatch for native tensors of an unexpected shape.
    """
    parts: dict[str, list[Part]] = {}
    copies: dict[str, list[Copy]] = {}
    dtypes: dict[str, str] = {}
    shifts: dict[str, int] = {}
    for item in placed:
        check_shape(item)
        copy = item.native.copy
        again = copy is not None or (item.native.replicated and any(name in parts for name in item.native.parts))
        tensor = item.tensor if item.native.view is None else reshaped(item.tensor, item.native.view)
        for name, regions in item.native.parts.items():
            found = [Part(region, tensor, item.native.name, item.where) for region in regions]
            if again:
                copies.setdefault(name, []).extend(
                    Copy(
                        part,
                        f"the copy {item.native.name} in {item.where}",
                        strict or (copy is not None and copy.must_equal),
                    )
                    for part in found
                )
                continue
            parts.setdefault(name, []).extend(found)
            shifts[name] = item.native.shift if slot in (WEIGHT, MASTER) else 0
            if dtypes.setdefault(name, item.tensor.dtype) != item.tensor.dtype:
                raise TensorMismatch(
                    f"{item.where}: {item.native.name} is {item.tensor.dtype}, other ranks have {dtypes[name]}"
                )
    return {
        (key := Key(name, slot)): Assembled(key, shape, dtypes[name], parts[name], copies.get(name, ()), shifts[name])
        for name, shape in shapes.items()
        if slot == WEIGHT or name in parts
    }


def check_shape(item: Placed) -> None:
    if tuple(item.tensor.shape) != item.native.shape:
        raise TensorMismatch(
            f"{item.where}: {item.native.name} is {list(item.tensor.shape)}, expected {list(item.native.shape)} by the configuration",
            code="misshapen-tensor",
        )
