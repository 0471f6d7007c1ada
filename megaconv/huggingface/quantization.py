"""Selects the weights of a Hugging Face output to store in FP8, INT8 or 4 bits, and places their scales.

Weights of attention, MLP and experts are quantized. Embeddings, head, norms, routers and indexers are not. A fused
native tensor is quantized only if each canonical tensor in it fills whole blocks: 128 rows for FP8 by blocks, 16 elements of
a row for NVFP4, 128 elements of two rows for INT4 of ModelOpt. The others need whole rows. Otherwise it stays unquantized and is
listed with the others (`quantization_config.py`). `calibrated.py` has the scales of activations, `packed.py` chooses the
weights of MXFP4 and of packed integers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from formats.tensor import Box, matrix_shape
from megaconv.errors import NotExpressible, UsageError
from megaconv.huggingface.calibrated import (
    CONSTANTS,
    Calibrated,
    calibrated_forms,
    with_cache_scales,
)
from megaconv.huggingface.packed import (
    WEIGHT_SHAPE,
    Packing,
    mxfp4_forms,
    packed_forms,
    packing_of,
)
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import (
    CALIBRATED,
    FP8,
    FP8_BLOCK,
    FP8_PER_CHANNEL,
    INT4_AWQ,
    INT8_SQ,
    KV_CACHES,
    MXFP4,
    NVFP4,
    PACKED,
    QUANTIZATIONS,
    W4A8_AWQ,
    W4A16,
    W8A16,
    SaveOptions,
)
from megaconv.values import calibrated, fp8_blocks, fp8_rows, mxfp4
from megaconv.values.calibration import Calibration, read_calibration
from megaconv.values.forms import Form
from megaconv.values.four_bits import MXFP4_GROUP
from megaconv.values.fp8_blocks import BLOCK, grid
from megaconv.values.nvfp4 import GROUP, scales_shape
from megaconv.values.quantizing import SCALE, SCALE_2

_LINEAR = re.compile(r"(.*\.)?(attn|mlp)\.(?!.*router\.|indexer\.|.*_norm\.).*\.weight")
_JOINED = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_down", "kv_down"), "down"),
    **dict.fromkeys(("k_up", "v_up"), "kv_up"),
}
"""Weights that inference engines fuse: the last part of a weight's name -> the fused name."""


def lossy(quantize: str, options: SaveOptions) -> str:
    """The notice that a conversion gives about the quantization."""
    group = packing_of(options).group
    how = {
        FP8_BLOCK: "float8_e4m3fn with a scale for each block of 128 by 128",
        FP8_PER_CHANNEL: "float8_e4m3fn with a scale for each row",
        NVFP4: "4 bits with a scale for each 16 of a row",
        MXFP4: "4 bits with a power of two for each 32 of a row",
        W4A16: f"4 bits with a scale for each {group} of a row",
        W8A16: f"8 bits with a scale for each {group} of a row",
        FP8: "float8_e4m3fn with one scale for each matrix",
        INT8_SQ: "8 bits with a scale for each row, after SmoothQuant",
        INT4_AWQ: "4 bits with a scale for each 128 of a row, after AWQ",
        W4A8_AWQ: "4 bits with a scale for each 128 of a row, after AWQ",
    }
    moved = (
        "; norms take over AWQ's factors, so that the errors of the weights behind them include these factors"
        if quantize in (INT4_AWQ, W4A8_AWQ)
        else ""
    )
    which = (
        "weights of experts" if _is_of_experts(options) else "weights of attention, MLP and experts"
    )
    return (
        f"{which} are rounded to {how[quantize]} ({quantize}); "
        f"fingerprints are of the values that are read back{moved}"
    )


def unquantized_experts(natives: Sequence[NativeTensor], options: SaveOptions) -> str | None:
    """The notice about experts that only MXFP4 could quantize; None if there are none."""
    is_stacked = any(
        native.of_experts and len(native.shape) == 3 and all(map(_LINEAR.fullmatch, native.parts))
        for native in natives
    )
    if not is_stacked or options.quantize == MXFP4:
        return None
    return (
        f"weights of experts are not rounded: the model's files have all experts of a layer in one tensor, "
        f"for which {options.quantize} has no form"
    )


def _is_of_experts(options: SaveOptions) -> bool:
    """True if only experts are quantized."""
    return options.quantize == MXFP4 or packing_of(options).only_experts


def quantized_forms(
    natives: Sequence[NativeTensor], header: Header, options: SaveOptions
) -> dict[Key, Form]:
    """The form of each quantized canonical tensor.

    Raises UsageError for an unknown name or in combination with --base, NotExpressible if no tensor can be quantized.
    """
    kind = options.quantize
    if kind not in QUANTIZATIONS:
        raise UsageError(
            f"--quantize {kind}: is not known; choose one of {', '.join(QUANTIZATIONS)}"
        )
    if header.config.has("compressed_layers"):
        raise NotExpressible(
            f"--quantize {kind}: is not supported for {header.config.family}, whose quantized files have another form; leave it out"
        )
    if options.base is not None:
        raise UsageError(
            "--quantize: --base copies the original's tensors as they are; leave one of them out"
        )
    statistics = _statistics(kind, options)
    if kind == MXFP4:
        return mxfp4_forms(natives, header)
    packing = packing_of(options)
    fits, needed = _packed_fitting(packing) if kind in PACKED else _FITTING[kind]
    chosen = [native for native in natives if _is_linear(native) and fits(native)]
    if not chosen:
        raise NotExpressible(
            f"--quantize {kind}: {header.config.family} has no weight here that could be stored so: "
            f"each has to be a matrix [out, in]{needed}"
        )
    if kind in CALIBRATED and statistics is not None:
        found = calibrated_forms(Calibrated(chosen, header, kind, statistics))
    elif kind in PACKED:
        found = packed_forms(chosen, kind, packing)
    else:
        found = _weight_forms(chosen, kind)
    if options.kv_cache is not None and statistics is not None:
        found = with_cache_scales(found, natives, header, statistics)
    return found


def require_quantization(options: SaveOptions) -> None:
    """Raises UsageError for options that only a quantized output uses, and for an unneeded calibration."""
    kind = options.quantize
    packing_of(options)
    if kind is not None:
        is_needed = kind in CALIBRATED or options.kv_cache is not None
        if options.calibration is not None and not is_needed:
            raise UsageError(
                f"--calibration: --quantize {kind} needs no statistics of activations; leave it out"
            )
        return
    for name, value in (("--kv-cache", options.kv_cache), ("--calibration", options.calibration)):
        if value is not None:
            raise UsageError(f"{name} {value}: is for a quantized output; pass --quantize too")


def _weight_forms(natives: Sequence[NativeTensor], kind: str) -> dict[Key, Form]:
    """The forms of weights in a quantization that needs no calibration."""
    return {
        Key(name): Form(kind, 0, _joined(name), not place) if kind == NVFP4 else Form(kind)
        for native in natives
        for place, name in enumerate(native.parts)
    }


def _statistics(kind: str, options: SaveOptions) -> Calibration | None:
    """The statistics of activations; None if they aren't needed. Raises UsageError for options that don't fit."""
    cache = options.kv_cache
    if cache not in (None, *KV_CACHES):
        raise UsageError(f"--kv-cache {cache}: is not known; choose {' or '.join(KV_CACHES)}")
    if cache is not None and kind in (FP8_BLOCK, MXFP4, *PACKED):
        raise UsageError(
            f"--kv-cache {cache}: {kind} has no place for scales of a cache; choose another --quantize"
        )
    needing = f"--quantize {kind}" if kind in CALIBRATED else f"--kv-cache {cache}"
    is_needed = kind in CALIBRATED or cache is not None
    if is_needed and options.calibration is None:
        raise UsageError(
            f"{needing}: needs statistics of activations; run `megatron-lite calibrate` and pass its file as --calibration",
            code="option-needed",
        )
    return None if options.calibration is None else read_calibration(options.calibration)


def _is_linear(native: NativeTensor) -> bool:
    return (
        len(native.shape) == 2
        and native.shape[0] != 1
        and all(map(_LINEAR.fullmatch, native.parts))
    )


def _joined(name: str) -> str:
    """A name that is equal for all weights that share a scale_2."""
    path, kind, _ = name.rsplit(".", 2)
    if kind == "gate" or kind == "up":
        path = re.sub(r"\.experts\.\d+$", ".experts", path)
    return f"{path}.{_JOINED.get(kind, kind)}"


def _fills_blocks(native: NativeTensor) -> bool:
    return all(_is_whole_blocks(region, native) for region in _regions(native))


def _is_whole_blocks(region: Region, native: NativeTensor) -> bool:
    begins_block = region.row % BLOCK == 0 and region.box.row0 % BLOCK == 0
    end = region.row + region.box.rows
    ends_block = end == native.shape[0] or end % BLOCK == 0
    return _is_plain(region, native) and begins_block and ends_block


def _fills_groups(native: NativeTensor) -> bool:
    shared = {_joined(name) for name in native.parts}
    return _has_whole_rows(native) and not native.shape[1] % GROUP and len(shared) == 1


def _has_whole_rows(native: NativeTensor) -> bool:
    return all(_is_plain(region, native) for region in _regions(native))


def _regions(native: NativeTensor) -> Iterator[Region]:
    """All regions of a native tensor, part by part."""
    return chain.from_iterable(native.parts.values())


def _is_plain(region: Region, native: NativeTensor) -> bool:
    """True if the region holds whole rows, in the order of the canonical tensor."""
    box = region.box
    return region == Region(box, region.row) and (box.col0, box.col1) == (0, native.shape[1])


def _has_paired_groups(native: NativeTensor) -> bool:
    """True if each part has an even number of rows, and rows consist of whole groups of INT4."""
    even = all(
        region.row % 2 == region.box.row0 % 2 == region.box.rows % 2 == 0
        for region in _regions(native)
    )
    return _has_whole_rows(native) and not native.shape[1] % calibrated.GROUP and even


_GROUPS_OF_INT4 = ", with an even number of rows and a multiple of 128 columns"
_FITTING = {
    FP8_BLOCK: (_fills_blocks, ", or made of whole blocks of 128 rows"),
    FP8_PER_CHANNEL: (_has_whole_rows, ""),
    NVFP4: (_fills_groups, ", with a multiple of 16 columns"),
    FP8: (_has_whole_rows, ""),
    INT8_SQ: (_has_whole_rows, ""),
    INT4_AWQ: (_has_paired_groups, _GROUPS_OF_INT4),
    W4A8_AWQ: (_has_paired_groups, _GROUPS_OF_INT4),
}
"""Quantization -> (True for a native tensor that it can store, the condition in words)."""


def _packed_fitting(packing: Packing) -> "tuple[Callable[[NativeTensor], bool], str]":
    """The entry of packed integers in _FITTING."""
    return lambda native: packing.fits(native) and _has_whole_rows(native), packing.condition


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
