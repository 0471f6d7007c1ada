"""Tensors that are stored as runs of their elements: the state of Megatron's distributed optimizer.

Its buffers are vectors that hold one parameter after another (`narrowed`). Megatron core 0.9 to 0.15 also stored tensors
flattened, shard by shard (`unflatten`):

A tensor of shape (G0, G1) that was split into f0 x f1 shards of shape (l0, l1) is stored as (f0, f1, l0 * l1): the last axis
runs through a shard's elements. Chunks are runs of them, as data-parallel ranks held them; the true shape stands in
`.metadata` (mcore_data: formats.dcp_metadata.DcpMetadata.flattened).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from formats.chunked import Chunk, ChunkedTensor, Stored
from formats.errors import CorruptCheckpoint
from formats.tensor import ITEMSIZE, FileTensor, LazyTensor, Shape


@dataclass(frozen=True)
class _Run:
    """Some elements of a flat chunk, as a rectangle of another shape (formats.chunked.Stored)."""

    stored: Stored
    first: int
    shape: Shape

    def tensor(self) -> LazyTensor:
        return narrowed(self.stored.tensor(), self.first, self.shape)


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
    return ChunkedTensor(shape, tensor.dtype, list(_overlapping(tensor, start, stop, shape)))


def _overlapping(vector: ChunkedTensor, start: int, stop: int, shape: Shape) -> Iterator[Chunk]:
    for chunk in vector.chunks:
        first, last = max(start, chunk.offset[0]), min(stop, chunk.offset[0] + chunk.shape[0])
        if first < last:
            for place, part, element in _parts(first - start, last - start, shape):
                yield Chunk.whole(place, part, _Run(chunk.stored, start + element - chunk.offset[0], part))


def unflatten(tensor: ChunkedTensor, shape: Shape) -> ChunkedTensor:
    """The tensor as it truly is. shape: its true one. Raises CorruptCheckpoint for one that can't have been flattened so."""
    # (f0, f1, l0 * l1): the shards along each axis of the true shape, then the elements of one shard.
    *shard_counts, elements = tensor.shape or (0,)
    fits = len(shard_counts) == len(shape) and all(
        count and not size % count for count, size in zip(shard_counts, shape, strict=True)
    )
    local = tuple(size // count for size, count in zip(shape, shard_counts, strict=True)) if fits else ()
    if not fits or prod(local) != elements:
        raise CorruptCheckpoint(f"a tensor {list(shape)} can't have been flattened into {list(tensor.shape)}")
    return ChunkedTensor(shape, tensor.dtype, list(_rectangles(tensor, local)))


def _rectangles(tensor: ChunkedTensor, local: Shape) -> Iterator[Chunk]:
    for chunk in tensor.chunks:
        if any(size != 1 for size in chunk.shape[:-1]):
            raise CorruptCheckpoint(f"a chunk {list(chunk.shape)} of a flattened tensor is of several shards")
        # The chunk is a run of elements of one shard, whose place among the shards gives its corner.
        start = chunk.offset[-1]
        corner = [place * size for place, size in zip(chunk.offset, local, strict=False)]
        for place, shape, first in _parts(start, start + chunk.shape[-1], local):
            offset = tuple(a + b for a, b in zip(corner, place, strict=True))
            yield Chunk.whole(offset, shape, _Run(chunk.stored, first - start, shape))


def _parts(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape, int]]:
    """Elements start to stop of a row-major array as rectangles: (place, shape, number of the first element)."""
    if len(shape) < 2:
        if start < stop:
            yield (start,) * len(shape), (stop - start,) * len(shape), start
        return
    inner = prod(shape[1:])
    head = min(stop, -(-start // inner) * inner)  # the rest of a row that was begun
    tail = max(head, stop // inner * inner)  # from here on a row that is not ended
    first, last = head // inner, tail // inner
    for row, begin, end in ((start // inner, start, head), (last, tail, stop)):
        for place, part, element in _parts(begin - row * inner, end - row * inner, shape[1:]):
            yield (row, *place), (1, *part), row * inner + element
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * inner
