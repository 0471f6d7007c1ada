"""The blocks of ggml's quantized types: their bytes, and the numbers that they stand for.

    q4_0    32 numbers    float16 d; 16 bytes of 4-bit codes: d * (code - 8)
    q8_0    32 numbers    float16 d; 32 signed bytes: d * code
    q4_k    256 numbers   float16 d, float16 m; 12 bytes of eight 6-bit scales s and eight minima n; 128 bytes of 4-bit codes:
                          d * s * code - m * n for each 32
    q5_k    256 numbers   the same with 32 bytes of fifth bits before the codes
    q6_k    256 numbers   128 bytes of low and 64 bytes of high code bits; 16 signed scales s; float16 d: d * s * (code - 32)
                          for each 16

`ggml_quantizers.py` makes such blocks. `ggml_read_blocks.py` has the types that are read alone.
Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from formats.gguf import BLOCK_TYPES, READ_TYPES
from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape, whole_groups
from megaconv.errors import NotExpressible
from megaconv.model.assembled import window
from megaconv.values.code_tensors import AT_ONCE
from megaconv.values.ggml_codes import HALF, halves, nibbles
from megaconv.values.ggml_quantizers import QUANTIZERS
from megaconv.values.ggml_read_blocks import READ_VALUES
from megaconv.values.ggml_weighted import WEIGHTED
from megaconv.values.rounding import rounded
from megaconv.values.scaled import read_bytes, read_floats

_SCALES = 12
"""Bytes of the scales and minima of q4_k and q5_k."""
_SCALE_BYTES = {
    **dict.fromkeys(("q4_0", "q8_0"), slice(0, HALF)),
    **dict.fromkeys(("q4_k", "q5_k"), slice(0, 2 * HALF)),
    "q6_k": slice(-HALF, None),
}
"""The bytes of a block's float16 numbers."""
_LARGEST = 65504.0 * 128 * 32
"""The largest number of q6_k, and so of all these types."""


@dataclass(frozen=True)
class BlockValues:
    """A tensor [..., cols] of quantized blocks. Values are computed in float32, and rounded to `dtype`."""

    blocks: LazyTensor
    """The blocks as bytes: [rows, cols / numbers of a block * bytes of a block]."""
    kind: str
    """The type of the blocks, such as `q4_k`."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        numbers, nbytes = READ_TYPES[self.kind]
        # The blocks that hold the box's columns may hold further columns.
        whole = whole_groups(box, numbers)
        first, last = whole.col0 // numbers * nbytes, whole.col1 // numbers * nbytes
        stored = read_bytes(self.blocks, box._replace(col0=first, col1=last))
        values = values_of(self.kind, stored.reshape(-1, nbytes)).reshape(box.rows, -1)
        wanted = values[:, box.col0 - whole.col0 : box.col1 - whole.col0]
        np.copyto(out, rounded(np.ascontiguousarray(wanted), self.dtype))


@dataclass(frozen=True)
class BlockTensor:
    """Another tensor's rows in quantized blocks, as bytes."""

    source: LazyTensor
    kind: str
    name: str
    """The tensor's name for messages."""
    dtype: str = "uint8"

    @property
    def shape(self) -> Shape:
        return blocks_shape(self.source.shape, self.kind)

    def read_into(self, box: Box, out: Bytes) -> None:
        numbers, nbytes = BLOCK_TYPES[self.kind]
        for part in box_blocks(box, self.dtype, AT_ONCE):
            whole = whole_groups(part, nbytes)
            first, last = whole.col0 // nbytes * numbers, whole.col1 // nbytes * numbers
            values = read_floats(self.source, part._replace(col0=first, col1=last))
            quantize = partial(QUANTIZERS[self.kind], values.reshape(-1, numbers))
            made = _finite_blocks(quantize, values, self.kind, self.name).reshape(part.rows, -1)
            np.copyto(window(out, box, part, 1), window(made, whole, part, 1))


@dataclass(frozen=True, eq=False)
class WeightedBlockTensor:
    """Another tensor's rows in quantized blocks, as bytes, with an importance of each column."""

    source: LazyTensor
    kind: str
    importance: Floats
    """[cols], float32: the mean of the squared inputs."""
    name: str
    """The tensor's name for messages."""
    dtype: str = "uint8"
    whole_rows: bool = True
    """A block of the engine has whole rows, because q4_0 needs the mean of a row."""

    @property
    def shape(self) -> Shape:
        return blocks_shape(self.source.shape, self.kind)

    def read_into(self, box: Box, out: Bytes) -> None:
        cols = matrix_shape(self.source.shape)[1]
        at_once = max(1, AT_ONCE // cols)
        for row0 in range(box.row0, box.row1, at_once):
            row1 = min(row0 + at_once, box.row1)
            rows = read_floats(self.source, Box(row0, row1, 0, cols))
            quantize = partial(WEIGHTED[self.kind], rows, self.importance)
            made = _finite_blocks(quantize, rows, self.kind, self.name).reshape(len(rows), -1)
            part = Box(row0, row1, box.col0, box.col1)
            np.copyto(window(out, box, part, 1), made[:, box.col0 : box.col1])


def _finite_blocks(quantize: Callable[[], Bytes], numbers: Floats, kind: str, name: str) -> Bytes:
    """The blocks [blocks, bytes of a block] of numbers, whose values are finite.

    Raises NotExpressible for a number that isn't finite, or too large for a float16 scale.
    """
    if np.abs(numbers).max(initial=0) <= _LARGEST:
        with np.errstate(over="ignore", invalid="ignore"):
            blocks = quantize()
        if np.isfinite(halves(blocks[:, _SCALE_BYTES[kind]])).all():
            return blocks
    raise NotExpressible(
        f"{name}: holds values that are not finite, or too large, which {kind} can't express; choose another gguf_type, such as f32"
    )


def blocks_shape(shape: Shape, kind: str) -> Shape:
    """The shape of a tensor's blocks as a matrix of bytes."""
    rows, cols = matrix_shape(shape)
    numbers, nbytes = READ_TYPES[kind]
    return rows, cols // numbers * nbytes


def values_of(kind: str, blocks: Bytes) -> Floats:
    """[blocks, bytes of a block] -> [blocks, numbers of a block] float32."""
    return _VALUES[kind](blocks)


def _q4_0(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, HALF:], 16).reshape(-1, 32)
    return halves(blocks[:, :HALF]) * (codes.astype(np.float32) - 8)


def _q8_0(blocks: Bytes) -> Floats:
    codes = np.ascontiguousarray(blocks[:, HALF:]).view(np.int8)
    return codes.astype(np.float32) * halves(blocks[:, :HALF])


def _q4_k(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 2 * HALF + _SCALES :], 32)
    return _with_minima(blocks, codes)


def _q5_k(blocks: Bytes) -> Floats:
    start = 2 * HALF + _SCALES
    fifth, low = blocks[:, start : start + 32], nibbles(blocks[:, start + 32 :], 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high: Bytes = fifth[:, None, :] >> shifts & np.uint8(1)
    codes: Bytes = low | high << np.uint8(4)
    return _with_minima(blocks, codes)


def _q6_k(blocks: Bytes) -> Floats:
    low = nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = low | high.reshape(-1, 8, 32) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    factors = halves(blocks[:, 208:]) * scales
    values = factors[:, :, None] * (codes.astype(np.float32) - 32).reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _with_minima(blocks: Bytes, codes: Bytes) -> Floats:
    """codes: [blocks, 8, 32]."""
    scales, minima = scales_and_minima(blocks[:, 2 * HALF : 2 * HALF + _SCALES])
    factors = halves(blocks[:, :HALF]) * scales
    offsets = halves(blocks[:, HALF : 2 * HALF]) * minima
    values = factors[:, :, None] * codes.astype(np.float32) - offsets[:, :, None]
    return values.reshape(-1, 256)


def scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """[blocks, 12] -> two of [blocks, 8]: numbers of 6 bits.

    The first four have their bits in one byte each. The upper two bits of the last four are in the same bytes, the
    lower four in the last four bytes.
    """
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    upper_scales, upper_minima = scales >> 2 & 0x30, minima >> 2 & 0x30
    first = np.concatenate([scales & 63, rest & 15 | upper_scales], axis=1)
    second = np.concatenate([minima & 63, rest >> 4 | upper_minima], axis=1)
    return first.astype(np.float32), second.astype(np.float32)


_VALUES: Mapping[str, Callable[[Bytes], Floats]] = {
    "q4_0": _q4_0,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    **READ_VALUES,
}
