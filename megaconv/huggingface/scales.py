"""Places the tensors of a quantized weight in the files: its codes, its scales and its constants."""

from collections.abc import Iterator

from formats.tensor import Box, matrix_shape
from megaconv.huggingface.calibrated import CONSTANTS
from megaconv.huggingface.packed import WEIGHT_SHAPE
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import (
    FP8,
    FP8_BLOCK,
    FP8_PER_CHANNEL,
    INT8_SQ,
    MXFP4,
    NVFP4,
    PACKED,
    W4A8_AWQ,
)
from megaconv.values import calibrated, fp8_blocks, fp8_rows, mxfp4
from megaconv.values.four_bits import MXFP4_GROUP
from megaconv.values.fp8_blocks import BLOCK, grid
from megaconv.values.nvfp4 import scales_shape
from megaconv.values.quantizing import SCALE, SCALE_2


def with_scales(native: NativeTensor, header: Header, quantize: str) -> Iterator[NativeTensor]:
    """A native tensor as it is stored, followed by its scales and constants if it is quantized.

    header: header of the stored tensors.
    """
    yield from _with_weight_scales(native, header, quantize)
    for name in native.parts:
        for constant in (*CONSTANTS, WEIGHT_SHAPE):
            beside = f"{name.removesuffix('.weight')}.{constant}"
            info = header.manifest.get(Key(beside))
            if info is not None:
                rows, cols = matrix_shape(info.shape)
                region = Region(Box(0, rows, 0, cols), 0)
                stored_as = f"{native.name.removesuffix('.weight')}.{constant}"
                yield NativeTensor(stored_as, {beside: (region,)}, info.shape)


def _with_weight_scales(
    native: NativeTensor, header: Header, quantize: str
) -> Iterator[NativeTensor]:
    rows, cols = matrix_shape(native.shape)
    if not is_quantized(native, header):
        yield native
    elif quantize == FP8_BLOCK:
        yield native
        blocks = grid(native.shape)
        yield _scaled(native, fp8_blocks.SCALES, BLOCK, blocks[1])._replace(shape=blocks)
    elif quantize in (FP8_PER_CHANNEL, INT8_SQ):
        yield native
        scales_of_rows = _scaled(native, SCALE, 1, 1)
        yield scales_of_rows._replace(shape=fp8_rows.scales_shape(native.shape))
    elif quantize == FP8:
        yield native
        yield _shared_scale(native, SCALE)
    elif quantize == NVFP4:
        scales = scales_shape(native.shape)
        yield _scaled(native, "", 1, cols // 2)._replace(shape=(rows, cols // 2))
        yield _scaled(native, SCALE, 1, scales[1])._replace(shape=scales)
        yield _shared_scale(native, SCALE_2)
    elif quantize == MXFP4:
        yield from _mxfp4(native)
    elif quantize in PACKED:
        yield from _packed(native, header)
    else:
        groups = cols // calibrated.GROUP
        yield _scaled(native, "", 2, cols)._replace(shape=(rows // 2, cols))
        yield _scaled(native, SCALE, 1, groups)._replace(shape=(rows, groups))
        if quantize == W4A8_AWQ:
            yield _shared_scale(native, SCALE_2)


def _mxfp4(native: NativeTensor) -> Iterator[NativeTensor]:
    """The codes [experts, rows, blocks, 16] and the exponents [experts, rows, blocks] of the experts of a layer."""
    blocks = native.shape[-1] // MXFP4_GROUP
    grid_shape = (*native.shape[:-1], blocks)
    codes = {
        name: tuple(
            Region(
                Box(region.box.row0 * blocks, region.box.row1 * blocks, 0, mxfp4.BLOCK_BYTES),
                region.row * blocks,
            )
            for region in regions
        )
        for name, regions in native.parts.items()
    }
    yield NativeTensor(f"{native.name}_blocks", codes, (*grid_shape, mxfp4.BLOCK_BYTES))
    exponents = _scaled(native, SCALE, 1, blocks)
    yield exponents._replace(name=f"{native.name}_scales", shape=grid_shape)


def _packed(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """The words and the scales of a weight. header: header of the stored tensors."""
    first = next(iter(native.parts))
    words, scales = (matrix_shape(header.manifest[Key(first + end)].shape) for end in ("", SCALE))
    rows = native.shape[0]
    codes = _scaled(native, "", 1, words[1])
    yield codes._replace(name=f"{native.name}_packed", shape=(rows, words[1]))
    yield _scaled(native, SCALE, 1, scales[1])._replace(shape=(rows, scales[1]))


def _shared_scale(native: NativeTensor, end: str) -> NativeTensor:
    """The single scale of a native tensor. It is stored with the first part."""
    first = next(iter(native.parts))
    return NativeTensor(native.name + end, {first + end: (Region(Box(0, 1, 0, 1), 0),)}, ())


def _scaled(native: NativeTensor, end: str, rows: int, cols: int) -> NativeTensor:
    """The tensor of scales or codes that belongs to a native tensor.

    It has one row per `rows` native rows, and `cols` columns. end: the suffix of both names.
    """
    parts = {
        name + end: tuple(
            Region(
                Box(region.box.row0 // rows, -(-region.box.row1 // rows), 0, cols),
                region.row // rows,
            )
            for region in regions
        )
        for name, regions in native.parts.items()
    }
    return NativeTensor(native.name + end, parts, native.shape)


def is_quantized(native: NativeTensor, header: Header) -> bool:
    """True if a native tensor is stored in a quantized form. header: header of the stored tensors."""
    first = Key(next(iter(native.parts)))
    ends = (SCALE, fp8_blocks.SCALES)
    return any(first._replace(name=first.name + end) in header.manifest for end in ends)
