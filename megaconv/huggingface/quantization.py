"""Selects the weights of a Hugging Face output to store in FP8, INT8 or 4 bits.

Weights of attention, MLP and experts are quantized. Embeddings, head, norms, routers and indexers are not. A fused
native tensor is quantized only if each canonical tensor in it fills whole blocks: 128 rows for FP8 by blocks, 16 elements of
a row for NVFP4, 128 elements of two rows for INT4 of ModelOpt. The others need whole rows. Otherwise it stays unquantized and is
listed with the others (`quantization_config.py`). Experts that can't be quantized are refused (`matrices.py` has the reason).
`calibrated.py` has the scales of activations, `packed.py` chooses the weights of MXFP4 and of packed integers, and
`scales.py` places all scales in the files.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain

from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family
from megaconv.huggingface.calibrated import (
    Calibrated,
    calibrated_forms,
    with_cache_scales,
)
from megaconv.huggingface.matrices import Fitting, is_linear, is_routed, is_stacked, kinds
from megaconv.huggingface.packed import (
    mxfp4_forms,
    packed_forms,
    packing_of,
    require_readable,
    smaller_group,
)
from megaconv.huggingface.scales import is_quantized
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
from megaconv.values import calibrated
from megaconv.values.calibration import Calibration, read_calibration
from megaconv.values.forms import Form
from megaconv.values.fp8_blocks import BLOCK
from megaconv.values.nvfp4 import GROUP

_JOINED = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_down", "kv_down"), "down"),
    **dict.fromkeys(("k_up", "v_up"), "kv_up"),
}
"""Weights that inference engines fuse: the last part of a weight's name -> the fused name."""

_NOT_QUANTIZED = {
    "compressed_layers": "whose quantized files have another form",
    "shared_blocks": "whose layers share matrices, which no software is known to load in such a form",
}
"""Feature of models that can't be quantized -> the reason."""


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


def notices(natives: Sequence[NativeTensor], header: Header, options: SaveOptions) -> Iterator[str]:
    """Notices about the rounded weights, and about those that stay as they are. header: header of the stored tensors."""
    yield lossy(options.quantize or "", options)
    if options.quantize == MXFP4:
        return
    if any(map(is_stacked, natives)):
        yield (
            f"weights of experts are not rounded: the model's files have all experts of a layer in one tensor, "
            f"for which {options.quantize} has no form"
        )
    plain = [native for native in natives if is_linear(native) and not is_quantized(native, header)]
    if plain and not _is_of_experts(options):
        yield _about_plain(plain, options)


def _about_plain(plain: Sequence[NativeTensor], options: SaveOptions) -> str:
    """The notice about matrices that the form can't hold."""
    smaller = smaller_group(plain, options)
    remedy = "" if smaller is None else f"; --option group_size={smaller} fits all of them"
    return (
        f"these weights are not rounded: {kinds(plain)}; {options.quantize} needs a matrix [out, in]"
        f"{_fitting(options).condition}{remedy}"
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
    for feature, reason in _NOT_QUANTIZED.items():
        if header.config.has(feature):
            raise NotExpressible(
                f"--quantize {kind}: is not supported for {header.config.family}, {reason}; leave it out"
            )
    if options.base is not None:
        raise UsageError(
            "--quantize: --base copies the original's tensors as they are; leave one of them out"
        )
    statistics = _statistics(kind, options)
    if kind == MXFP4:
        return mxfp4_forms(natives, header)
    if kind in PACKED:
        require_readable(kind, header)
    matrices = _chosen(natives, header, options)
    if kind in CALIBRATED and statistics is not None:
        found = calibrated_forms(Calibrated(matrices, header, kind, statistics))
    elif kind in PACKED:
        found = packed_forms(matrices, kind, packing_of(options))
    else:
        found = _weight_forms(matrices, kind)
    if options.kv_cache is not None and statistics is not None:
        found = with_cache_scales(found, natives, header, statistics)
    return found


def _chosen(
    natives: Sequence[NativeTensor], header: Header, options: SaveOptions
) -> list[NativeTensor]:
    """The matrices that the form can hold. Raises NotExpressible if there is none, and if there are other experts."""
    fitting = _fitting(options)
    linear = [native for native in natives if is_linear(native)]
    found = [native for native in linear if fitting.holds(native)]
    if not found:
        raise NotExpressible(
            f"--quantize {options.quantize}: {header.config.family} has no weight here that could be stored so: "
            f"each has to be a matrix [out, in]{fitting.condition}"
        )
    other = [native for native in linear if is_routed(native) and not fitting.holds(native)]
    if other:
        smaller = smaller_group(other, options)
        remedy = "another value" if smaller is None else f"--option group_size={smaller}"
        raise NotExpressible(
            f"--quantize {options.quantize}: can't hold {kinds(other)}, and engines need all experts of a layer in one form. "
            f"Each matrix has to be [out, in]{fitting.condition}; choose {remedy}"
        )
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


def require_described(table: Family, config: bytes, quantize: str) -> None:
    """Raise NotExpressible for a quantized output that the family wouldn't describe. config: its config.json."""
    if not table.describes(json.loads(config)):
        raise NotExpressible(
            f"--quantize {quantize}: the names in quantized files of {table.name} aren't known; leave it out"
        )


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
    FP8_BLOCK: Fitting(_fills_blocks, ", or made of whole blocks of 128 rows"),
    FP8_PER_CHANNEL: Fitting(_has_whole_rows, ""),
    NVFP4: Fitting(_fills_groups, ", with a multiple of 16 columns"),
    FP8: Fitting(_has_whole_rows, ""),
    INT8_SQ: Fitting(_has_whole_rows, ""),
    INT4_AWQ: Fitting(_has_paired_groups, _GROUPS_OF_INT4),
    W4A8_AWQ: Fitting(_has_paired_groups, _GROUPS_OF_INT4),
}
"""Quantization -> the matrices that it can hold. Packed integers depend on options too."""


def _fitting(options: SaveOptions) -> Fitting:
    """The matrices that the chosen quantization can hold."""
    if options.quantize not in PACKED:
        return _FITTING[options.quantize or ""]
    packing = packing_of(options)
    return Fitting(
        lambda native: packing.fits(native) and _has_whole_rows(native), packing.condition
    )
