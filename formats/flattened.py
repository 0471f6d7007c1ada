"""Tensors that Megatron core 0.9 to 0.15 stored flattened, shard by shard: optimizer state of its distributed optimizer.

A tensor of shape (G0, G1) that was cut into f0 x f1 shards of shape (l0, l1) is stored as (f0, f1, l0 * l1): the last axis
runs through a shard's elements. Chunks are runs of them, as data-parallel ranks held them; the true shape stands in
`.metadata` (mcore_data: formats.dcp_metadata.DcpMetadata.flattened).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from formats.chunked import Chunk, ChunkedTensor, Stored
from formats.errors import CorruptCheckpoint
from formats.tensor import ITEMSIZE, FileTensor, Shape


@dataclass(frozen=True)
class _Run:
    """Some elements of a flat chunk, as a rectangle of another shape (formats.chunked.Stored)."""

    stored: Stored
    first: int
    shape: Shape

    def tensor(self) -> FileTensor:
        flat = self.stored.tensor()
        if not isinstance(flat, FileTensor):
            raise CorruptCheckpoint(
                f"a flattened tensor {list(flat.shape)} is not contiguous; save the checkpoint again"
            )
        return FileTensor(flat.file, flat.offset + self.first * ITEMSIZE[flat.dtype], self.shape, flat.dtype)


def unflatten(tensor: ChunkedTensor, shape: Shape) -> ChunkedTensor:
    """The tensor as it truly is. shape: its true one. Raises CorruptCheckpoint for one that can't have been flattened so."""
    *cuts, elements = tensor.shape or (0,)
    fits = len(cuts) == len(shape) and all(count and not size % count for count, size in zip(cuts, shape, strict=True))
    local = tuple(size // count for size, count in zip(shape, cuts, strict=True)) if fits else ()
    if not fits or prod(local) != elements:
        raise CorruptCheckpoint(f"a tensor {list(shape)} can't have been flattened into {list(tensor.shape)}")
    return ChunkedTensor(shape, tensor.dtype, list(_rectangles(tensor, local)))


def _rectangles(tensor: ChunkedTensor, local: Shape) -> Iterator[Chunk]:
    for chunk in tensor.chunks:
        if any(size != 1 for size in chunk.shape[:-1]):
            raise CorruptCheckpoint(f"a chunk {list(chunk.shape)} of a flattened tensor is of several shards")
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
