"""Reads FP8 weights of the quantization method `fp8` as plain weights, and the FP4 experts of DeepSeek V4.

    by blocks (DeepSeek V3, Qwen3)   x.weight [out, in] float8_e4m3fn, x.weight_scale_inv [out / 128, in / 128] of floats:
                                     value * the scale of its block; the last blocks of a row or column may be narrower
    the same (DeepSeek V4)           x.scale in place of x.weight_scale_inv, in float8_e8m0fnu: powers of two
    the same in MXFP8                x.weight_scale_inv [out, in / 32] uint8: the exponents of powers of two
    one scale (Ministral 3)          x.weight_scale_inv [], for a weight_block_size of null: value * the scale
    one scale (AutoFP8, tables of    x.weight, or its rows in x.shard_0.weight ..., [rows, cols] float8_e4m3fn,
    Qwen4-Exp)                       x.weight_scale [1]: value * the scale
    FP4 (experts of DeepSeek V4)     x.weight [out, in / 2] int8, x.scale [out, in / 32] float8_e8m0fnu: as MXFP4

Scales of activations are left out. Sources: README_WEIGHTS.md and inference/kernel.py of DeepSeek-V3,
integrations/finegrained_fp8.py of transformers 5.24.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from formats.tensor import LazyTensor, matrix_shape, reshaped
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.values.beside_weights import needed
from megaconv.values.compressed_floats import Exponents
from megaconv.values.four_bits import MXFP4_GROUP, Mxfp4Tensor
from megaconv.values.modelopt import scales_of_activations
from megaconv.values.scaled import ScaledTensor

Block = tuple[int, int]

_FP8, _POWERS = "float8_e4m3fn", "float8_e8m0fnu"
_FLOATS = ("float32", "bfloat16", "float16")
_BLOCK = [128, 128]
"""The blocks of settings without weight_block_size."""
_WEIGHT, _SCALE_INV, _V4_SCALE, _ONE_SCALE = ".weight", "_scale_inv", ".scale", ".weight_scale"
_PART_OF_TABLE = re.compile(r"\.shard_\d+(?=\.weight$)")


def block_of(quantization: Mapping[str, Any], where: str) -> Block | None:
    """The rows and columns that share a scale; None: all of a matrix."""
    block = quantization.get("weight_block_size", _BLOCK)
    if block is None:
        return None
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise UnsupportedInput(
            f"{where}: fp8 weights with weight_block_size {block!r:.60}; "
            "only blocks of rows and columns, or null for one scale of a matrix, are supported"
        )
    return block[0], block[1]


def described(quantization: Mapping[str, Any], where: str) -> str:
    """The form of the weights, for people."""
    block = block_of(quantization, where)
    return "one scale for each matrix" if block is None else f"blocks of {block[0]} x {block[1]}"


def dequantize(
    tensors: Mapping[str, LazyTensor], block: Block | None, dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises TensorMismatch for scales that are missing or don't fit.
    """
    scale_names = {name: _scale_name(name, tensors) for name in tensors}
    are_scales = {scale for scale in scale_names.values() if scale is not None}
    is_v4 = any(scale.endswith(_V4_SCALE) for scale in are_scales)
    left_out = {*are_scales, *scales_of_activations(tensors, where)}
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE_INV):
            needed(name.removesuffix(_SCALE_INV), tensors, where)
        if name in left_out:
            continue
        scale_name = scale_names[name]
        if scale_name is None:
            _require_plain(name, tensor, is_v4, where)
            found[name] = tensor
            continue
        scales = tensors[scale_name]
        if tensor.dtype == "int8" and scales.dtype == _POWERS:
            found[name] = _fp4(name, tensor, scales, dtype, where)
        elif block is None or scale_name == _one_scale(name):
            found[name] = _with_one_scale(name, tensor, scales, dtype, where)
        else:
            found[name] = _with_blocks(name, tensor, scales, block, dtype, where)
    return found


def _scale_name(name: str, tensors: Mapping[str, LazyTensor]) -> str | None:
    """The name of a tensor's scales; None if it has none."""
    if name + _SCALE_INV in tensors:
        return name + _SCALE_INV
    is_quantized = tensors[name].dtype in (_FP8, "int8")
    if not is_quantized or not name.endswith(_WEIGHT):
        return None
    return next((scale for scale in (_v4_scale(name), _one_scale(name)) if scale in tensors), None)


def _v4_scale(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _V4_SCALE


def _one_scale(name: str) -> str:
    """The name of the only scale of a matrix. The rows of an embedding may be in several tensors."""
    return _PART_OF_TABLE.sub("", name).removesuffix(_WEIGHT) + _ONE_SCALE


def _require_plain(name: str, tensor: LazyTensor, is_v4: bool, where: str) -> None:
    """Raise TensorMismatch for a quantized tensor, which lacks its scales."""
    is_packed = tensor.dtype == "int8" and is_v4
    if tensor.dtype == _FP8 or is_packed:
        kind = "fp4" if is_packed else "fp8"
        missing = _v4_scale(name) if is_v4 else name + _SCALE_INV
        raise TensorMismatch(
            f"{where}: {name} is {kind}, and there is no {missing}", code="missing-tensor"
        )


def _with_one_scale(
    name: str, tensor: LazyTensor, scale: LazyTensor, dtype: str, where: str
) -> ScaledTensor:
    """A matrix of FP8 with one scale. Raises TensorMismatch for more scales, or for other dtypes."""
    is_matrix = len(tensor.shape) == 2 and tensor.dtype == _FP8
    if not is_matrix or scale.dtype not in _FLOATS or prod(scale.shape) != 1:
        raise TensorMismatch(
            f"{where}: {name} is {list(tensor.shape)} {tensor.dtype} "
            f"with scales {list(scale.shape)} {scale.dtype}; "
            "expected a matrix of float8_e4m3fn with one scale in float32, bfloat16 or float16",
            code="misshapen-tensor",
        )
    return ScaledTensor(tensor, reshaped(scale, (1, 1)), matrix_shape(tensor.shape), dtype)


def _with_blocks(
    name: str, tensor: LazyTensor, scales: LazyTensor, block: Block, dtype: str, where: str
) -> ScaledTensor:
    """A matrix of FP8 with a scale for each block. Raises TensorMismatch for other scales."""
    rows, cols = matrix_shape(tensor.shape)
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    numbers = Exponents(scales) if scales.dtype == "uint8" else scales
    has_dtypes = tensor.dtype == _FP8 and numbers.dtype in (*_FLOATS, _POWERS)
    if not has_dtypes or tuple(scales.shape) != grid:
        raise TensorMismatch(
            f"{where}: {name} is {list(tensor.shape)} {tensor.dtype} "
            f"with scales {list(scales.shape)} {scales.dtype}; "
            f"expected float8_e4m3fn with {list(grid)} float32, bfloat16, float16 or float8_e8m0fnu",
            code="misshapen-tensor",
        )
    return ScaledTensor(tensor, numbers, block, dtype)


def _fp4(name: str, packed: LazyTensor, scales: LazyTensor, dtype: str, where: str) -> Mxfp4Tensor:
    """A matrix of two 4-bit values per byte. Raises TensorMismatch for scales that don't fit."""
    rows, half = matrix_shape(packed.shape)
    if tuple(scales.shape) != (rows, 2 * half // MXFP4_GROUP) or 2 * half % MXFP4_GROUP:
        raise TensorMismatch(
            f"{where}: {name} is {list(packed.shape)} int8 with scales {list(scales.shape)}; "
            f"expected [out, in / 2] and [out, in / {MXFP4_GROUP}]"
        )
    return Mxfp4Tensor(packed, scales, (rows, 2 * half), dtype)
