"""Reads llm-compressor's checkpoints (`compressed-tensors`) in FP8, INT8, INT4 and small floats as plain weights.

    FP8 and INT8    X.weight [out, in], X.weight_scale [1], [out, 1] or [out, in / group]
    FP8 by blocks   X.weight [out, in], X.weight_scale [out / rows, in / cols], the last blocks of any size
    packed INT4     X.weight_packed [out, in / 8] int32, X.weight_shape [2], X.weight_scale [out, 1] or [out, in / group]
    packed INT8     the same with X.weight_packed [out, in / 4]
    small floats    MXFP4, NVFP4, MXFP8 (`compressed_floats.py`)
    asymmetric      beside the scales, X.weight_zero_point: int8 of their shape, or packed [out / 8 or 4, scales of a row] int32

`packed_words.py` describes the words. Source: compressed-tensors 0.20.1.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from formats.lazy_numpy import np
from formats.tensor import LazyTensor, Shape, matrix_shape, read_tensor, reshaped
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.model.check import well_formed
from megaconv.values.beside_weights import needed, require_one_form
from megaconv.values.compressed_floats import KINDS, MXFP8, NVFP4, POWERS, Exponents, from_packed
from megaconv.values.modelopt import scales_of_activations
from megaconv.values.packed_words import ColumnWords, RowWords
from megaconv.values.scaled import ScaledTensor
from megaconv.values.settings import value_of, weights_of_groups

_WEIGHT, _PACKED, _SHAPE, _SCALE = ".weight", ".weight_packed", ".weight_shape", ".weight_scale"
_ZERO_POINT = ".weight_zero_point"
_BESIDE = ("weight_shape", "weight_scale", "weight_zero_point", "weight_global_scale")
"""The last parts of the names of tensors that belong to a quantized weight."""
_FLOATS = ("float32", "bfloat16", "float16")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *KINDS)
_MIXED = "mixed-precision"
"""The format of a model whose groups have formats of their own."""
_SCHEMES = {("float", 8): "FP8", ("int", 8): "INT8", ("int", 4): "INT4"}
_STRATEGIES = ("tensor", "channel", "group", "block")


def scheme_of(settings: Any, where: str) -> str:
    """The scheme of the weights, such as `INT4 by groups of 128`; empty if only activations are quantized.

    Raises UnsupportedInput for an unsupported scheme.
    """
    if not isinstance(settings, Mapping) or "config_groups" not in settings:
        raise CorruptCheckpoint(
            f"{where}: quantization_config of compressed-tensors has no config_groups, which name the scheme of the weights"
        )
    inside = f"{where}: quantization_config"
    groups = weights_of_groups(settings, inside)
    layouts = _layouts(settings, inside)
    for (path, weights), layout in zip(groups.items(), layouts, strict=True):
        _require_kinds(weights, path, layout)
    with well_formed(inside):
        _require_none(
            {
                "rotated weights": bool(settings.get("transform_config")),
                "sparse weights": _is_sparse(settings),
            },
            where,
        )
        found = [
            _scheme(weights, layout, where)
            for weights, layout in zip(groups.values(), layouts, strict=True)
        ]
    return ", ".join(sorted(set(found)))


def _layouts(settings: Mapping[str, Any], inside: str) -> list[str]:
    """The format of each group with weights, in the order of config_groups. inside: the file and the key, for messages."""
    layout = value_of(settings, "format", str, inside)
    groups = _quantized_groups(settings)
    if layout != _MIXED:
        return [layout] * len(groups)
    return [
        value_of(group, "format", str, f"{inside}.config_groups.{name}")
        for name, group in groups.items()
    ]


def _quantized_groups(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The groups of modules whose weights are quantized. Others have quantized activations or caches alone."""
    groups = settings["config_groups"]
    return {name: group for name, group in groups.items() if group["weights"] is not None}


def _is_sparse(settings: Mapping[str, Any]) -> bool:
    """True if weights leave out their zeros. The format `dense` only reports the share of zeros."""
    sparsity = settings.get("sparsity_config") or {}
    return bool(sparsity) and sparsity.get("format") != "dense"


def _require_kinds(weights: Mapping[str, Any], path: str, layout: str) -> None:
    """Raise CorruptCheckpoint for a setting of a wrong kind. path: the keys that lead to the weights."""
    value_of(weights, "type", str, path)
    value_of(weights, "num_bits", int, path)
    value_of(weights, "symmetric", bool, path)
    strategy = value_of(weights, "strategy", str, path)
    if strategy == "group" and layout not in KINDS:
        value_of(weights, "group_size", int, path)
    if strategy == "block":
        value_of(weights, "block_structure", list, path)


def _require_none(problems: Mapping[str, bool], where: str) -> None:
    """Raise UnsupportedInput that names the problems that are there."""
    found = [name for name, is_so in problems.items() if is_so]
    if found:
        raise UnsupportedInput(
            f"{where}: weights quantized by compressed-tensors with {', '.join(found)}; only symmetric FP8, INT8 and "
            "INT4 by tensor, channel, group or block, MXFP4, MXFP8 and NVFP4 "
            "are supported: convert an unquantized copy of the model"
        )


def _scheme(weights: Mapping[str, Any], layout: str, where: str) -> str:
    number, strategy = (weights["type"], weights["num_bits"]), weights["strategy"]
    small = KINDS.get(layout)
    name, bits, size = small or (_SCHEMES.get(number, ""), 0, 0)
    is_known = number == ("float", bits) if small else number in _SCHEMES
    group = weights.get("group_size")
    groups_as = "tensor_group" if layout == NVFP4 else "group"
    has_other_groups = (strategy, group) != (groups_as, size)
    problems = {
        f"{number[0]} of {number[1]} bits": not is_known,
        f"{name} by {strategy:.40}, group_size {group!r:.40}": bool(small) and has_other_groups,
        f"format {layout!r:.40}": layout not in _FORMATS,
        f"strategy {strategy!r:.40}": strategy not in _STRATEGIES and not small,
        "columns in another order": weights.get("actorder") in ("group", "dynamic"),
        "asymmetric numbers": number[0] == "float" and not weights["symmetric"],
    }
    _require_none(problems, where)
    by = strategy
    if strategy in ("group", "tensor_group"):
        by = f"groups of {weights['group_size']}"
    elif strategy == "block":
        by = f"blocks of {' by '.join(map(str, weights['block_structure']))}"
    kind = name if weights["symmetric"] else f"asymmetric {name}"
    return f"{kind} by {by}"


@dataclass(frozen=True)
class _Scheme:
    """The forms of numbers and scales, by the groups of the settings."""

    units: frozenset[tuple[int, int]]
    """(rows, columns) that may share a scale, besides a row and a whole matrix."""
    widths: tuple[int, ...]
    """The bits that a number may have."""
    is_asymmetric: bool
    """True if every weight has zero points."""
    layouts: frozenset[str]
    """The formats of the groups."""

    @classmethod
    def of_groups(cls, settings: Mapping[str, Any], inside: str) -> "_Scheme":
        groups = [group["weights"] for group in _quantized_groups(settings).values()]
        units: set[tuple[int, int]] = set()
        for weights in groups:
            if weights["strategy"] == "block":
                rows, cols = weights["block_structure"]
                units.add((rows, cols))
            elif weights["strategy"] == "group":
                units.add((1, weights["group_size"]))
        return cls(
            units=frozenset(units),
            widths=tuple(sorted({weights["num_bits"] for weights in groups})),
            is_asymmetric=bool(groups) and not any(weights["symmetric"] for weights in groups),
            layouts=frozenset(_layouts(settings, inside)),
        )


def dequantize(
    tensors: Mapping[str, LazyTensor], settings: Any, dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises UnsupportedInput for another scheme, TensorMismatch if a scale is missing or doesn't fit.
    """
    scheme_of(settings, where)
    with well_formed(f"{where}: quantization_config"):
        scheme = _Scheme.of_groups(settings, f"{where}: quantization_config")
    left_out = set(scales_of_activations(tensors, where))
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in _BESIDE and module + _WEIGHT not in tensors:
            needed(module + _PACKED, tensors, where)
        if name in left_out or last in _BESIDE:
            continue
        if last == "weight_packed":
            require_one_form(module + _WEIGHT, name, tensors, where)
        is_quantized = module + _SCALE in tensors or tensor.dtype in ("float8_e4m3fn", "int8")
        if last == "weight_packed" and _is_of_small_floats(tensor, scheme):
            found[module + _WEIGHT] = from_packed(module, tensors, dtype, where)
        elif last == "weight_packed":
            codes = _unpacked(module, tensors, scheme.widths, where)
            found[module + _WEIGHT] = _plain(module, codes, tensors, scheme, dtype, where)
        elif last == "weight" and is_quantized:
            found[name] = _plain(module, tensor, tensors, scheme, dtype, where)
        else:
            found[name] = tensor
    return found


def _is_of_small_floats(packed: LazyTensor, scheme: _Scheme) -> bool:
    """True for bytes of two numbers. A model of small floats alone has nothing else."""
    kinds = scheme.layouts.intersection(KINDS)
    return bool(kinds) and (packed.dtype == "uint8" or kinds == scheme.layouts)


def _unpacked(
    module: str, tensors: Mapping[str, LazyTensor], widths: Sequence[int], where: str
) -> RowWords:
    """The numbers of a packed weight. widths: the bits that a number may have."""
    packed = tensors[module + _PACKED]
    sizes = _sizes(module, tensors, where)
    for bits in widths:
        fits = len(sizes) == 2 and tuple(packed.shape) == (sizes[0], _words(sizes[1], bits))
        if fits and packed.dtype == "int32":
            return RowWords(packed, sizes, bits)
    raise TensorMismatch(
        f"{where}: {module}{_PACKED} is {list(packed.shape)} {packed.dtype} "
        f"for a weight of {list(sizes)}; "
        "expected int32, each with eight numbers of 4 bits or four of 8 bits of a row",
        code="misshapen-tensor",
    )


def _words(count: int, bits: int) -> int:
    """The int32 words that so many numbers fill."""
    return -(-count // (32 // bits))


def _sizes(module: str, tensors: Mapping[str, LazyTensor], where: str) -> Shape:
    """The shape of a packed weight. It is stored as a tensor."""
    stored = needed(module + _SHAPE, tensors, where)
    if stored.dtype not in ("int32", "int64") or tuple(stored.shape) != (2,):
        raise TensorMismatch(
            f"{where}: {module}{_SHAPE} is {list(stored.shape)} {stored.dtype}; expected [2] int64",
            code="misshapen-tensor",
        )
    return tuple(read_tensor(stored).reshape(-1).view(np.dtype(stored.dtype)).tolist())


def _plain(
    module: str,
    codes: LazyTensor,
    tensors: Mapping[str, LazyTensor],
    scheme: _Scheme,
    dtype: str,
    where: str,
) -> ScaledTensor:
    scales = needed(module + _SCALE, tensors, where)
    if scales.dtype == "uint8" and MXFP8 in scheme.layouts:
        scales = Exponents(scales)
    block = _block(tuple(codes.shape), tuple(scales.shape), scheme.units)
    is_quantized = codes.dtype in ("float8_e4m3fn", "int8")
    if block is None or not is_quantized or scales.dtype not in (*_FLOATS, POWERS):
        raise TensorMismatch(
            f"{where}: {module}{_WEIGHT} is {list(codes.shape)} {codes.dtype} "
            f"with scales {list(scales.shape)} {scales.dtype}; "
            "expected float8_e4m3fn or int8 with one scale, [out, 1], [out, in / group] or one for each block",
            code="misshapen-tensor",
        )
    grid = _blocks(matrix_shape(codes.shape), block)
    bits = codes.bits if isinstance(codes, RowWords) else 8
    if scheme.is_asymmetric:
        needed(module + _ZERO_POINT, tensors, where)
    zero_points = _zero_points(module, tensors, grid, bits, where)
    scale_of_block = reshaped(scales, grid)
    return ScaledTensor(codes, scale_of_block, block, dtype, zero_points=zero_points)


def _zero_points(
    module: str, tensors: Mapping[str, LazyTensor], grid: tuple[int, int], bits: int, where: str
) -> LazyTensor | None:
    """The zero point of each block; None for symmetric numbers."""
    found = tensors.get(module + _ZERO_POINT)
    if found is None:
        return None
    if found.dtype == "int8" and prod(found.shape) == prod(grid):
        return reshaped(found, grid)
    if found.dtype == "int32" and tuple(found.shape) == (_words(grid[0], bits), grid[1]):
        return ColumnWords(found, grid, bits)
    raise TensorMismatch(
        f"{where}: {module}{_ZERO_POINT} is {list(found.shape)} {found.dtype} for scales {list(grid)}; "
        "expected int8 of this shape, or int32 words with numbers of a column",
        code="misshapen-tensor",
    )


def _block(shape: Shape, scales: Shape, units: Set[tuple[int, int]]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None if the scales don't fit."""
    if len(shape) != 2 or not prod(shape):
        return None
    rows, cols = shape
    fitting = (
        unit for unit in sorted(units) if min(unit) > 0 and _blocks((rows, cols), unit) == scales
    )
    found = next(fitting, None)
    if found is not None and (found[0] > 1 or not cols % found[1]):
        return found
    if prod(scales) == 1:
        return rows, cols
    return (1, cols) if scales in ((rows,), (rows, 1)) else None


def _blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks down and across. The last ones may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
