"""Reads llm-compressor's checkpoints (`compressed-tensors`) in FP8, INT8 and INT4 as plain weights.

    FP8 and INT8    X.weight [out, in], X.weight_scale [1], [out, 1] or [out, in / group]
    FP8 by blocks   X.weight [out, in], X.weight_scale [out / rows, in / cols], the last blocks of any size
    INT4            X.weight_packed [out, in / 8] int32, X.weight_shape [2], X.weight_scale [out, 1] or [out, in / group]

An int32 holds eight numbers of 4 bits, the lowest bits first, each with 8 added. Source: compressed-tensors 0.20.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, read_tensor, reshaped
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.model.check import well_formed
from megaconv.values.modelopt import scales_of_activations
from megaconv.values.scaled import ScaledTensor, read_bytes

_WEIGHT, _PACKED, _SHAPE, _SCALE = ".weight", ".weight_packed", ".weight_shape", ".weight_scale"
_FLOATS = ("float32", "bfloat16", "float16")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_SCHEMES = {("float", 8): "FP8", ("int", 8): "INT8", ("int", 4): "INT4"}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class NibbleWords:
    """A matrix [rows, cols] of int8 numbers from -8 to 7, eight per int32."""

    values: LazyTensor
    """[rows, cols / 8] int32, the last one of a row padded."""
    shape: Shape
    dtype: str = "int8"

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.col0 // 8, -(-box.col1 // 8)
        words = read_bytes(self.values, Box(box.row0, box.row1, first, last), itemsize=4)
        codes = np.stack([words & 15, words >> 4], axis=2).reshape(box.rows, -1)
        wanted = codes[:, box.col0 - 8 * first : box.col1 - 8 * first]
        np.copyto(out, wanted - np.uint8(8))  # wraps around, as the bytes of int8 do


def scheme_of(settings: Any, where: str) -> str:
    """The scheme of the weights, such as `INT4 by groups of 128`. Raises UnsupportedInput for an unsupported scheme."""
    if not isinstance(settings, Mapping) or "config_groups" not in settings:
        raise CorruptCheckpoint(
            f"{where}: quantization_config of compressed-tensors has no config_groups, which name the scheme of the weights"
        )
    with well_formed(f"{where}: quantization_config"):
        weights = [group["weights"] for group in settings["config_groups"].values()]
        found = [_scheme(each, settings, where) for each in weights]
    return ", ".join(sorted(set(found)))


def _scheme(weights: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> str:
    number, strategy = (weights["type"], weights["num_bits"]), weights["strategy"]
    problems = {
        f"{number[0]} of {number[1]} bits": number not in _SCHEMES,
        f"format {settings['format']!r:.40}": settings["format"] not in _FORMATS,
        f"strategy {strategy!r:.40}": strategy not in _STRATEGIES,
        "asymmetric numbers": not weights["symmetric"],
        "columns in another order": weights.get("actorder") in ("group", "dynamic"),
        "rotated weights": bool(settings.get("transform_config")),
        "sparse weights": bool(settings.get("sparsity_config")),
        "packed INT8": number[1] == 8 and settings["format"] == "pack-quantized",
    }
    found = [name for name, is_so in problems.items() if is_so]
    if found:
        raise UnsupportedInput(
            f"{where}: weights quantized by compressed-tensors with {', '.join(found)}; only symmetric FP8, INT8 and "
            "packed INT4 by tensor, channel, group or block are supported: convert an unquantized copy of the model"
        )
    by = strategy
    if strategy == "group":
        by = f"groups of {weights['group_size']}"
    elif strategy == "block":
        by = f"blocks of {' by '.join(map(str, weights['block_structure']))}"
    return f"{_SCHEMES[number]} by {by}"


def _units(settings: Mapping[str, Any]) -> set[tuple[int, int]]:
    """(rows, columns) that may share a scale, by the groups of the settings."""
    found: set[tuple[int, int]] = set()
    for group in settings["config_groups"].values():
        weights = group["weights"]
        if weights["strategy"] == "block":
            rows, cols = weights["block_structure"]
            found.add((rows, cols))
        elif weights["strategy"] == "group":
            found.add((1, weights["group_size"]))
    return found


def dequantize(
    tensors: Mapping[str, LazyTensor], settings: Any, dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises UnsupportedInput for another scheme, TensorMismatch if a scale is missing or doesn't fit.
    """
    scheme_of(settings, where)
    with well_formed(f"{where}: quantization_config"):
        units = _units(settings)
    left_out = set(scales_of_activations(tensors, where))
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if name in left_out or last in ("weight_shape", "weight_scale"):
            continue
        is_quantized = module + _SCALE in tensors or tensor.dtype in ("float8_e4m3fn", "int8")
        if last == "weight_packed":
            codes = _unpacked(module, tensors, where)
            found[module + _WEIGHT] = _plain(module, codes, tensors, units, dtype, where)
        elif last == "weight" and is_quantized:
            found[name] = _plain(module, tensor, tensors, units, dtype, where)
        else:
            found[name] = tensor
    return found


def _unpacked(module: str, tensors: Mapping[str, LazyTensor], where: str) -> NibbleWords:
    packed = tensors[module + _PACKED]
    sizes = _sizes(module, tensors, where)
    fits = len(sizes) == 2 and tuple(packed.shape) == (sizes[0], -(-sizes[1] // 8))
    if packed.dtype != "int32" or not fits:
        raise TensorMismatch(
            f"{where}: {module}{_PACKED} is {list(packed.shape)} {packed.dtype} "
            f"for a weight of {list(sizes)}; "
            "expected int32, each with eight numbers of a row",
            code="misshapen-tensor",
        )
    return NibbleWords(packed, sizes)


def _sizes(module: str, tensors: Mapping[str, LazyTensor], where: str) -> Shape:
    """The shape of a packed weight. It is stored as a tensor."""
    stored = _needed(module + _SHAPE, tensors, where)
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
    units: set[tuple[int, int]],
    dtype: str,
    where: str,
) -> ScaledTensor:
    scales = _needed(module + _SCALE, tensors, where)
    block = _block(tuple(codes.shape), tuple(scales.shape), units)
    is_quantized = codes.dtype in ("float8_e4m3fn", "int8")
    if block is None or not is_quantized or scales.dtype not in _FLOATS:
        raise TensorMismatch(
            f"{where}: {module}{_WEIGHT} is {list(codes.shape)} {codes.dtype} "
            f"with scales {list(scales.shape)} {scales.dtype}; "
            "expected float8_e4m3fn or int8 with one scale, [out, 1], [out, in / group] or one for each block",
            code="misshapen-tensor",
        )
    scale_of_block = reshaped(scales, _blocks(matrix_shape(codes.shape), block))
    return ScaledTensor(codes, scale_of_block, block, dtype)


def _block(shape: Shape, scales: Shape, units: set[tuple[int, int]]) -> tuple[int, int] | None:
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


def _needed(name: str, tensors: Mapping[str, LazyTensor], where: str) -> LazyTensor:
    found = tensors.get(name)
    if found is None:
        raise TensorMismatch(f"{where}: there is no {name}", code="missing-tensor")
    return found
