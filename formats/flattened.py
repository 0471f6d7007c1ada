"""Tensors that are stored as runs of their elements: the state of Megatron's distributed optimizer.

The buffers of the optimizer are vectors that hold one parameter after another (`narrowed`). Megatron core 0.9 to 0.15
also stored tensors flattened, shard by shard (`unflatten`).

A tensor of shape (G0, G1) that is split into f0 x f1 shards of shape (l0, l1) is stored as (f0, f1, l0 * l1). The last
axis runs through a shard's elements. Chunks are runs of these elements, as data-parallel ranks held them. `.metadata`
has the true shape (mcore_data: formats.dcp_metadata.DcpMetadata.flattened).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from formats.chunked import Chunk, ChunkedTensor, Stored
from formats.errors import CorruptCheckpoint
from formats.tensor import ITEMSIZE, FileTensor, LazyTensor, Shape


@dataclass(frozen=True)
class _Held:
    """A tensor as a chunk of a larger one (formats.chunked.Stored)."""

    held: LazyTensor

    def tensor(self) -> LazyTensor:
        return self.held


def vector(parts: Sequence[LazyTensor]) -> ChunkedTensor:
    """Vectors joined one after another. Raises ValueError for a part that is not a vector."""
    chunks, start = list[Chunk](), 0
    for part in parts:
        if len(part.shape) != 1:
            raise ValueError(f"a partition of shape {list(part.shape)}")
        chunks.append(Chunk.whole((start,), tuple(part.shape), _Held(part)))
        start += part.shape[0]
    return ChunkedTensor((start,), parts[0].dtype, [chunk for chunk in chunks if chunk.shape[0]])


@dataclass(frozen=True)
class _Run:
    """Some elements of a flat chunk, as a rectangle of another shape (formats.chunked.Stored)."""

    stored: Stored
    first: int
    shape: Shape

    def tensor(self) -> LazyTensor:
        return narrowed(self.stored.tensor(), self.first, self.shape)


def narrowed(tensor: LazyTensor, start: int, shape: Shape) -> LazyTensor:
    """The elements from `start` on, in another shape, of a contiguous tensor or of a vector of chunks.

    Raises CorruptCheckpoint if the tensor has too few elements.
    """
    stop = start + prod(shape)
    if start < 0 or stop > prod(tensor.shape):
        raise CorruptCheckpoint(
            f"elements {start} to {stop} of a tensor that has {prod(tensor.shape)}"
        )
    if isinstance(tensor, FileTensor):
        return replace(tensor, offset=tensor.offset + start * ITEMSIZE[tensor.dtype], shape=shape)
    if not isinstance(tensor, ChunkedTensor) or len(tensor.shape) != 1:
        raise CorruptCheckpoint(
            f"a tensor {list(tensor.shape)} is not contiguous; save it with .contiguous()"
        )
    return ChunkedTensor(shape, tensor.dtype, list(_overlapping(tensor, start, stop, shape)))


def beginning(whole: ChunkedTensor, start: int, count: int, shape: Shape) -> ChunkedTensor:
    """The first `count` elements of a tensor of this shape, from a vector that holds them from `start` on. No chunk
    holds the other elements.

    Raises CorruptCheckpoint if the vector has too few elements.
    """
    stop = start + count
    if stop > whole.shape[0]:
        raise CorruptCheckpoint(f"elements {start} to {stop} of a vector that has {whole.shape[0]}")
    return ChunkedTensor(shape, whole.dtype, list(_overlapping(whole, start, stop, shape)))


def _overlapping(vector: ChunkedTensor, start: int, stop: int, shape: Shape) -> Iterator[Chunk]:
    for chunk in vector.chunks:
        first, last = max(start, chunk.offset[0]), min(stop, chunk.offset[0] + chunk.shape[0])
        if first < last:
            for place, part, element in _parts(first - start, last - start, shape):
                yield Chunk.whole(
                    place, part, _Run(chunk.stored, start + element - chunk.offset[0], part)
                )


def unflatten(tensor: ChunkedTensor, shape: Shape) -> ChunkedTensor:
    """The tensor in its true shape. shape: the true shape. Raises CorruptCheckpoint if it can't have been flattened in
    this way."""
    # (f0, f1, l0 * l1): the shards along each axis of the true shape, then the elements of one shard.
    *shard_counts, elements = tensor.shape or (0,)
    fits = len(shard_counts) == len(shape) and all(
        count and not size % count for count, size in zip(shard_counts, shape, strict=True)
    )
    local = (
        tuple(size // count for size, count in zip(shape, shard_counts, strict=True))
        if fits
        else ()
    )
    if not fits or prod(local) != elements:
        raise CorruptCheckpoint(
            f"a tensor {list(shape)} can't have been flattened into {list(tensor.shape)}"
        )
    return ChunkedTensor(shape, tensor.dtype, list(_rectangles(tensor, local)))


def _rectangles(tensor: ChunkedTensor, local: Shape) -> Iterator[Chunk]:
    for chunk in tensor.chunks:
        if any(size != 1 for size in chunk.shape[:-1]):
            raise CorruptCheckpoint(
                f"a chunk {list(chunk.shape)} of a flattened tensor is of several shards"
            )
        # The chunk is a run of elements of one shard. The shard's place among the shards gives its corner.
        start = chunk.offset[-1]
        end = start + chunk.shape[-1]
        corner = [place * size for place, size in zip(chunk.offset, local, strict=False)]
        for place, shape, first in _parts(start, end, local):
            offset = tuple(map(sum, zip(corner, place, strict=True)))
            run = _Run(chunk.stored, first - start, shape)
            yield Chunk.whole(offset, shape, run)


def _parts(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield elements start to stop of a row-major array as rectangles: (place, shape, number of the first element)."""
    if len(shape) < 2:
        if start < stop:
            yield (start,) * len(shape), (stop - start,) * len(shape), start
        return
    # The elements up to `head` and from `tail` on lie in incomplete rows. Whole rows are between them.
    width = prod(shape[1:])
    head = min(stop, -(-start // width) * width)
    tail = max(head, stop // width * width)
    first_whole, after_whole = head // width, tail // width
    yield from _parts_of_row(start // width, start, head, shape)
    yield from _parts_of_row(after_whole, tail, stop, shape)
    if first_whole < after_whole:
        inner_corner = (0,) * (len(shape) - 1)
        yield (first_whole, *inner_corner), (after_whole - first_whole, *shape[1:]), head


def _parts_of_row(
    row: int, start: int, stop: int, shape: Shape
) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield elements start to stop as _parts does. All of them lie in one row."""
    above = row * prod(shape[1:])
    for place, part, element in _parts(start - above, stop - above, shape[1:]):
        yield (row, *place), (1, *part), above + element
