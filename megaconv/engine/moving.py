"""A tensor on its way from a source into the output: each block of it is read, hashed, and written to its places."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from isal import isal_zlib

from formats.output import FileLayout
from formats.target import OutputFile
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, box_blocks, matrix_shape
from megaconv.engine.fingerprints import tensor_hasher
from megaconv.engine.plan import Placement, needed_boxes
from megaconv.engine.runs import Run
from megaconv.errors import UsageError
from megaconv.model.assembled import overlap, window
from megaconv.model.ir import Key
from megaconv.model.natives import Region
from megaconv.values.shifted import add_or_refuse


class Moving:
    """A tensor that is being moved. Its blocks are moved in the order of their rows; others may be moved in between."""

    def __init__(
        self,
        key: Key,
        tensor: LazyTensor,
        destinations: Sequence["Destination"],
        buffers: "Buffers",
        advance: Callable[[int], None] | None,
    ) -> None:
        """advance: called with the number of bytes of each hashed block; None: the tensor is not hashed here."""
        self.key, self._tensor, self._destinations = key, tensor, destinations
        self._buffers, self._advance = buffers, advance
        self._itemsize = ITEMSIZE[tensor.dtype]
        self._hasher = None if advance is None else tensor_hasher(tensor)
        # Reads the dequantized bytes too, if readers get other values than are stored.
        self._read_both = getattr(tensor, "read_both", None)
        self.rows, self._cols = matrix_shape(tensor.shape)

    def blocks(self, block_bytes: int) -> Iterator[Box]:
        """Yield the blocks that are read: the whole tensor if it is hashed, otherwise only what its places need."""
        is_whole = self._hasher is not None
        wanted = [Box(0, self.rows, 0, self._cols)] if is_whole else self._needed()
        row_bytes = self._cols * self._itemsize
        if getattr(self._tensor, "whole_rows", False) and row_bytes > block_bytes:
            raise UsageError(
                f"--max-memory: a row of {row_bytes:,} bytes doesn't fit into a block of {block_bytes:,}; allow more memory"
            )
        for box in wanted:
            yield from box_blocks(box, self._tensor.dtype, block_bytes)

    def _needed(self) -> list[Box]:
        return needed_boxes([each.place for each in self._destinations])

    def move(self, box: Box) -> None:
        """Move one block."""
        block = self._buffers.block(box.rows, box.cols * self._itemsize)
        if self._read_both is None:
            self._tensor.read_into(box, block)
            read = block
        else:
            read = self._read_both(box, block)
        for each in self._destinations:
            each.write(box, block)
        if self._hasher is not None and self._advance is not None:
            self._hasher.update(read.reshape(-1))
            self._advance(read.nbytes)

    def fingerprint(self) -> str | None:
        """The fingerprint, when all blocks were moved; None if the tensor is not hashed here."""
        return self._hasher.hexdigest() if self._hasher is not None else None

    def runs(self) -> dict[tuple[str, str], list[Run]]:
        """The ranges that were written, by (file, record)."""
        found: dict[tuple[str, str], list[Run]] = {}
        for each in self._destinations:
            where = each.place.file, each.place.record
            found.setdefault(where, []).extend(each.runs)
        return found


class Buffers:
    """The two blocks that a worker owns: one to read into, one to rearrange rows in."""

    def __init__(self, size: int) -> None:
        self._read = np.empty(size, np.uint8)
        self._gather = np.empty(size, np.uint8)

    def block(self, rows: int, row_bytes: int) -> Bytes:
        return self._read[: rows * row_bytes].reshape(rows, row_bytes)

    def gather(self, rows: int, row_bytes: int) -> Bytes:
        return self._gather[: rows * row_bytes].reshape(rows, row_bytes)

    def contiguous(self, rows: Bytes) -> Bytes:
        """The same rows without gaps, if necessary as a copy in the second block."""
        if rows.flags.c_contiguous:
            return rows
        gathered = self.gather(*rows.shape)
        np.copyto(gathered, rows)
        return gathered


class _NativeFile:
    """A native tensor in a staged file. It notes the ranges of bytes that were written."""

    def __init__(
        self, file: OutputFile, layout: FileLayout, place: Placement, dtype: str, buffers: Buffers
    ) -> None:
        self.itemsize = ITEMSIZE[dtype]
        self.runs = list[Run]()
        self._file, self._buffers = file, buffers
        self._row_bytes, self._offset = place.row_bytes, place.offset
        self._record_offset = layout.records[place.record].offset
        self._checksum = isal_zlib.crc32 if layout.needs_checksums else None

    def scratch(self, box: Box) -> Bytes:
        return self._buffers.gather(box.rows, box.cols * self.itemsize)

    def write(self, box: Box, rows: Bytes) -> None:
        """Write a rectangle: at once if it has full rows (or a single row), otherwise row by row."""
        offset = self._offset + box.row0 * self._row_bytes + box.col0 * self.itemsize
        is_one_range = rows.shape[1] == self._row_bytes or len(rows) == 1
        if is_one_range:
            self._write_range(offset, self._buffers.contiguous(rows).reshape(-1))
        elif self._checksum is not None:
            for row in rows:
                self._write_range(offset, row)
                offset += self._row_bytes
        else:
            # Without checksums, one entry stands for the whole rectangle.
            self.runs.append(Run(offset, rows.size, 0))
            for row in rows:
                self._file.write(self._record_offset + offset, row)
                offset += self._row_bytes

    def _write_range(self, offset: int, data: Bytes) -> None:
        self._file.write(self._record_offset + offset, data)
        checksum = self._checksum(data) if self._checksum is not None else 0
        self.runs.append(Run(offset, data.nbytes, checksum))


class Destination:
    """A canonical tensor's regions in one native tensor."""

    def __init__(
        self,
        place: Placement,
        file: OutputFile,
        layout: FileLayout,
        key: Key,
        dtype: str,
        buffers: Buffers,
    ) -> None:
        self.place = place
        self._native = _NativeFile(file, layout, place, dtype, buffers)
        self._key, self._dtype, self._buffers = key, dtype, buffers
        self._regions: Sequence[Region] = sorted(place.regions, key=lambda region: region.box.row1)
        self._ends = [region.box.row1 for region in self._regions]

    @property
    def runs(self) -> list[Run]:
        """The ranges that were written into the record."""
        return self._native.runs

    def write(self, box: Box, block: Bytes) -> None:
        """Write the part of a block that belongs into this native tensor. box: the block's place in the tensor."""
        for region in self._regions[bisect_left(self._ends, box.row0 + 1) :]:
            if region.box.row0 >= box.row1:
                break
            wanted = overlap(region.box, box)
            if wanted is not None:
                rows = self._shifted(window(block, box, wanted, self._native.itemsize))
                region.order.write(region, wanted, self._native, rows)

    def _shifted(self, rows: Bytes) -> Bytes:
        """The values as the native tensor stores them."""
        if not self.place.shift:
            return rows
        return add_or_refuse(
            self._buffers.contiguous(rows), self._dtype, self.place.shift, str(self._key)
        )
