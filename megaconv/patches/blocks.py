"""One block of a patch: how some rows of a tensor follow from the same rows of the base.

A block holds the bytes of a rectangle of a canonical tensor (`formats.tensor.row_blocks`, BLOCK_BYTES). Its first byte
is the code of its form:

    0   the rows are those of the base; nothing follows
    1   XOR: the bytes of new XOR base, as byte planes, compressed by zstandard
    2   sparse: the number of changed elements (uint32), then, compressed by zstandard, the distances between their
        positions (uint32 each; the first is a position) and their new values, both as byte planes
    3   whole: the bytes of new, as byte planes, compressed by zstandard

Byte planes: first the lowest byte of every element, then the next one. All numbers are little-endian. The smallest
form is stored.
"""

from typing import Any

from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import Bytes, np
from megaconv.errors import UsageError
from megaconv.extras import install

SAME, XOR, SPARSE, WHOLE = range(4)
LEVEL = 3
"""The level of zstandard: higher levels save a few percent, and take several times as long."""
_SPARSE_SHARE = 8
"""The sparse form is tried if at most one element in so many differs."""


def zstandard() -> Any:
    """The package. Raises UsageError if it isn't installed."""
    try:
        import zstandard as found
    except ImportError as error:
        raise UsageError(f"patches need zstandard ({error}); {install('delta')}") from error
    return found


def encode(new: Bytes, base: Bytes | None, itemsize: int) -> bytes:
    """A block. new, base: the bytes of the same elements, in one dimension; base is None if there is no such tensor."""
    if base is None:
        return bytes([WHOLE]) + _compressed(_planes(new, itemsize))
    difference = np.bitwise_xor(new, base)
    changed = np.flatnonzero(difference.reshape(-1, itemsize).any(axis=1))
    if not len(changed):
        return bytes([SAME])
    found = bytes([XOR]) + _compressed(_planes(difference, itemsize))
    if len(changed) * _SPARSE_SHARE * itemsize <= len(new):
        sparse = _sparse(new, changed, itemsize)
        found = min(found, sparse, key=len)
    return found


def decode(block: bytes, base: Bytes | None, itemsize: int, size: int) -> Bytes:
    """The bytes of the elements, in one dimension. size: their number. Raises ValueError for a damaged block."""
    form, content = block[0], block[1:]
    if form == WHOLE:
        return _elements(_decompressed(content, size), itemsize)
    if base is None:
        raise ValueError("a block that needs a base, for a tensor without one")
    if form == SAME:
        return base
    if form == XOR:
        difference = _elements(_decompressed(content, size), itemsize)
        return np.bitwise_xor(difference, base)
    if form == SPARSE:
        return _with_changes(content, base, itemsize)
    raise ValueError(f"a block of the unknown form {form}")


def _sparse(new: Bytes, changed: Any, itemsize: int) -> bytes:
    distances = np.diff(changed, prepend=0).astype("<u4")
    values = new.reshape(-1, itemsize)[changed].reshape(-1)
    content = _planes(distances.view(np.uint8), 4).tobytes() + _planes(values, itemsize).tobytes()
    count = len(changed).to_bytes(4, "little")
    return bytes([SPARSE]) + count + _compressed(np.frombuffer(content, np.uint8))


def _with_changes(content: bytes, base: Bytes, itemsize: int) -> Bytes:
    elements = base.reshape(-1, itemsize).copy()
    count = int.from_bytes(content[:4], "little")
    if not 0 < count <= len(elements):
        raise ValueError(f"a block with {count} changed elements")
    read = _decompressed(content[4:], count * (4 + itemsize))
    distances = _elements(read[: 4 * count], 4).view("<u4")
    values = _elements(read[4 * count :], itemsize)
    positions = np.cumsum(distances, dtype=np.int64)
    if int(positions[-1]) >= len(elements):
        raise ValueError("a block with a change behind its end")
    elements[positions] = values.reshape(-1, itemsize)
    return elements.reshape(-1)


def _planes(data: Bytes, itemsize: int) -> Bytes:
    """The bytes of elements as byte planes."""
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def _elements(planes: Bytes, itemsize: int) -> Bytes:
    """The inverse of `_planes`."""
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).reshape(-1)


def _compressed(data: Bytes) -> bytes:
    found: bytes = zstandard().ZstdCompressor(level=LEVEL).compress(data.data)
    return found


def _decompressed(content: bytes, size: int) -> Bytes:
    """Exactly `size` bytes. Raises ValueError otherwise, before more memory is taken."""
    package = zstandard()
    try:
        with package.ZstdDecompressor().stream_reader(content) as reader:
            found = reader.read(size + 1)
    except package.ZstdError as error:
        raise ValueError(f"a block that can't be decompressed ({error})") from error
    if len(found) != size:
        raise ValueError(f"a block of another size than {size} bytes")
    return np.frombuffer(found, np.uint8)


def damaged(where: str, error: ValueError) -> CorruptCheckpoint:
    """The error for a patch with a damaged block."""
    return CorruptCheckpoint(
        f"{where}: {error}; make the patch again, or copy it again", code="damaged-patch"
    )
