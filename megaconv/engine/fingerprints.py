"""Fingerprints: hashes of a model that depend only on its tensors.

A tensor's fingerprint is BLAKE3 over its dtype, its shape and its bytes (row-major, little-endian). The model's
fingerprint is BLAKE3 over the sorted list of names and tensor fingerprints: one hash for the weights, one for the
optimizer's slots. Naming, fusion, padding, sharding and format don't change the hashes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Bytes, LazyTensor, byte_count, row_blocks
from megaconv.engine.plan import BLOCK_BYTES
from megaconv.model.ir import WEIGHT, Key, Source, TensorInfo, shift_of
from megaconv.threads import thread_pool
from megaconv.values.shifted import ShiftedHasher


def tensor_hasher(tensor: LazyTensor) -> Any:
    """A BLAKE3 hasher (or a compatible object) that has hashed dtype and shape and expects the tensor's bytes."""
    # Shape and dtype after dequantization, if it is quantized.
    read: TensorInfo | LazyTensor = getattr(tensor, "read", tensor)
    shape, shift, dtype = ",".join(map(str, read.shape)), shift_of(tensor), read.dtype
    plain = blake3(f"{dtype}\0{shape}\0".encode())
    if not shift:
        return plain
    return ShiftedHasher(
        plain, blake3(f"{tensor.dtype}{shift:+d}\0{shape}\0".encode()), tensor.dtype, shift
    )


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a whole model.

    Two models are the same if and only if `weights` are equal (and `optimizer`, if both have one).
    """

    weights: str
    optimizer: str | None
    tensors: Mapping[Key, str] = field(repr=False)


def combine(tensors: Mapping[Key, str]) -> Fingerprint:
    def over(keys: list[Key]) -> str:
        lines = [f"{key.name}\0{key.slot}\0{tensors[key]}\n" for key in sorted(keys)]
        return str(blake3("".join(lines).encode("utf-8", "surrogatepass")).hexdigest())

    weights = [key for key in tensors if key.slot == WEIGHT]
    slots = [key for key in tensors if key.slot != WEIGHT]
    return Fingerprint(over(weights), over(slots) if slots else None, tensors)


def fingerprint_tensor(tensor: LazyTensor, advance: Callable[[int], None] | None = None) -> str:
    """Hexadecimal BLAKE3 of one tensor, which is read in blocks."""
    hasher = tensor_hasher(tensor)
    for block in read_blocks(tensor):
        hasher.update(block.reshape(-1))
        if advance is not None:
            advance(block.nbytes)
    return str(hasher.hexdigest())


def read_blocks(tensor: LazyTensor) -> Iterator[Bytes]:
    """A tensor's bytes in row-major order, block by block. A block is only valid until the next one."""
    itemsize = ITEMSIZE[tensor.dtype]
    buffer = np.empty(min(BLOCK_BYTES, byte_count(tensor.shape, tensor.dtype)), np.uint8)
    for box in row_blocks(tensor.shape, tensor.dtype, BLOCK_BYTES):
        block = buffer[: box.rows * box.cols * itemsize].reshape(box.rows, box.cols * itemsize)
        tensor.read_into(box, block)
        yield block


def fingerprint_source(
    source: Source,
    workers: int,
    advance: Callable[[int], None] | None = None,
    only: Collection[Key] | None = None,
) -> Fingerprint:
    """The fingerprint of a source. Reads every tensor once, or only the tensors in `only`."""
    with thread_pool(workers) as pool:
        items = [(key, tensor) for key, tensor in source.tensors() if only is None or key in only]
        # Largest first: a large tensor at the end would leave all threads but one without work.
        items.sort(key=lambda item: -byte_count(item[1].shape, item[1].dtype))
        digests = pool.map(lambda item: fingerprint_tensor(item[1], advance), items)
        return combine({key: digest for (key, _), digest in zip(items, digests, strict=True)})
