"""Tensors that are stored as runs of their elements, in row-major order, wherever a data-parallel rank's share begins and ends.

A run of a matrix is at most three rectangles: the end of a row, whole rows, the beginning of another. So what was stored
flat becomes a ChunkedTensor, of which any rectangle can be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from formats.chunked import Chunk, ChunkedTensor, Stored, require_cover
from formats.errors import CorruptCheckpoint
from formats.tensor import ITEMSIZE, FileTensor, LazyTensor, Shape


@dataclass(frozen=True)
class Slice:
    """Elements of a stored chunk from start on, under another shape (formats.chunked.Stored)."""

    stored: Stored
    start: int
    shape: Shape

    def tensor(self) -> LazyTensor:
        return narrowed(self.stored.tensor(), self.start, self.shape)


class Run(NamedTuple):
    """`length` elements of a shard, from its element `start` on, which are those of a stored chunk from `first` on."""

    start: int
    length: int
    stored: Stored
    first: int


def narrowed(tensor: LazyTensor, start: int, shape: Shape) -> LazyTensor:
    """The elements of a contiguous tensor, or of a vector of chunks, from start on, under another shape.

    Raises CorruptCheckpoint where it has not so many.
    """
    stop = start + prod(shape)
    if start < 0 or stop > prod(tensor.shape):
        raise CorruptCheckpoint(f"elements {start} to {stop} of a tensor that has {prod(tensor.shape)}")
    if isinstance(tensor, FileTensor):
        return replace(tensor, offset=tensor.offset + start * ITEMSIZE[tensor.dtype], shape=shape)
    if not isinstance(tensor, ChunkedTensor) or len(tensor.shape) != 1:
        raise CorruptCheckpoint(f"a tensor {list(tensor.shape)} is not contiguous; save it with .contiguous()")
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        first, last = max(start, chunk.offset[0]), min(stop, chunk.offset[0] + chunk.shape[0])
        if first < last:
            run = Run(first - start, last - first, chunk.stored, first - chunk.offset[0])
            chunks.extend(_place(run, shape, (0,) * len(shape)))
    return ChunkedTensor(shape, tensor.dtype, chunks)


def unflatten(key: str, tensor: ChunkedTensor, shape: Shape) -> ChunkedTensor:
    """A tensor of its true shape from one [shards along each axis ..., elements of a shard]; each shard is flat.

    key: for messages. Raises CorruptCheckpoint where the two shapes don't fit.
    """
    counts, length = tensor.shape[:-1], tensor.shape[-1] if tensor.shape else 0
    if len(counts) != len(shape) or any(not count or size % count for size, count in zip(shape, counts, strict=True)):
        raise CorruptCheckpoint(f"{key}: stored as {list(tensor.shape)}, which is no flattened {list(shape)}")
    shard = tuple(size // count for size, count in zip(shape, counts, strict=True))
    if prod(shard) != length:
        raise CorruptCheckpoint(f"{key}: its shards have {length} elements, those of {list(shape)} {prod(shard)}")
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if not prod(chunk.shape):
            continue
        if prod(chunk.shape[:-1]) != 1:
            raise CorruptCheckpoint(f"{key}: a chunk {list(chunk.shape)} is not of one shard")
        place = tuple(index * size for index, size in zip(chunk.offset[:-1], shard, strict=True))
        chunks.extend(_place(Run(chunk.offset[-1], chunk.shape[-1], chunk.stored, 0), shard, place))
    require_cover(key, shape, [(chunk.offset, chunk.shape) for chunk in chunks])
    return ChunkedTensor(shape, tensor.dtype, chunks)


def _place(run: Run, shard: Shape, place: Shape) -> Iterator[Chunk]:
    """The rectangles of a run; place: of the shard in the tensor."""
    for offset, sizes, start in rectangles(run.start, run.length, shard):
        stored = Slice(run.stored, run.first + start - run.start, sizes)
        yield Chunk.whole(tuple(a + b for a, b in zip(place, offset, strict=True)), sizes, stored)


def rectangles(start: int, length: int, shape: Shape) -> Iterator[tuple[Shape, Shape, int]]:
    """(offset, shape, its first element's number) of rectangles that a run of elements is made of, in order."""
    if len(shape) < 2:
        yield (start,) * len(shape), (length,) * len(shape), start
        return
    inner, position, end = prod(shape[1:]), start, start + length
    while position < end:
        row, before = divmod(position, inner)
        rows = 0 if before else (end - position) // inner
        if rows:
            yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:]), position
            position += rows * inner
            continue
        count = min(end - position, inner - before)
        for offset, sizes, first in rectangles(before, count, shape[1:]):
            yield (row, *offset), (1, *sizes), row * inner + first
        position += count
