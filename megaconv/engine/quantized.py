"""Quantized weights as plain ones, computed block by block while they are read; numpy does all the arithmetic.

    FP8 by blocks (DeepSeek-V3)     x.weight [out, in] float8_e4m3fn, x.weight_scale_inv [out / 128, in / 128] float32:
                                    value * the scale of its block; the last blocks of a row or column may be narrower
    MXFP4 (GPT-OSS)                 x_blocks [..., in / 32, 16] uint8, x_scales [..., in / 32] uint8:
                                    two values a byte, the low four bits first, times 2 ^ (scale - 127)

Products are formed in float32, where both are exact or rounded once, and rounded to nearest even from there. Sources:
README_WEIGHTS.md and inference/kernel.py of DeepSeek-V3; the OCP Microscaling Formats specification, 1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, reshaped
from megaconv.engine.cast import CastTensor
from megaconv.engine.rounding import Floats, rounded
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.families.parts.hf_config import quant_method, quantization

_SCALE_INV, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_GROUP = 32
"""Elements of MXFP4 that share a scale."""


@dataclass(frozen=True)
class Fp8Tensor:
    """[rows, cols] of 8 bit times a scale for each block of rows and columns."""

    values: LazyTensor
    scales: LazyTensor
    block: tuple[int, int]
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.values.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        raw = np.empty((box.rows, box.cols), np.uint8)
        self.values.read_into(box, raw)
        high, wide = self.block
        over = Box(box.row0 // high, -(-box.row1 // high), box.col0 // wide, -(-box.col1 // wide))
        scales = np.empty((over.rows, over.cols * 4), np.uint8)
        self.scales.read_into(over, scales)
        rows = np.arange(box.row0, box.row1) // high - over.row0
        cols = np.arange(box.col0, box.col1) // wide - over.col0
        found = _fp8_values()[raw]
        found *= scales.view(np.float32)[rows][:, cols]
        np.copyto(out, rounded(found, self.dtype))


@dataclass(frozen=True)
class Mxfp4Tensor:
    """[..., in] of 4 bit, two a byte, times a power of two for each 32 of a row."""

    packed: LazyTensor
    """[rows, in / 2] bytes."""
    scales: LazyTensor
    """[rows, in / 32] exponents."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.col0 // _GROUP, -(-box.col1 // _GROUP)
        packed = np.empty((box.rows, (last - first) * _GROUP // 2), np.uint8)
        self.packed.read_into(Box(box.row0, box.row1, first * _GROUP // 2, last * _GROUP // 2), packed)
        exponents = np.empty((box.rows, last - first), np.uint8)
        self.scales.read_into(Box(box.row0, box.row1, first, last), exponents)
        pairs = _fp4_pairs()[packed].reshape(box.rows, last - first, _GROUP)
        with np.errstate(over="ignore", invalid="ignore"):
            pairs *= _powers()[exponents][:, :, None]
        cols = slice(box.col0 - first * _GROUP, box.col1 - first * _GROUP)
        np.copyto(out, rounded(np.ascontiguousarray(pairs.reshape(box.rows, -1)[:, cols]), self.dtype))


def dequantize(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    dtype: str | None,
    where: str,
    *,
    overflow: bool = False,
) -> dict[str, LazyTensor]:
    """The same tensors with plain ones in place of quantized ones and their scales.

    config: config.json. dtype: of what was quantized; None: bfloat16. overflow: as for CastTensor, of float16. Raises
    UnsupportedInput for another method, TensorMismatch for scales that are missing or don't fit.
    """
    if dtype == "float16":
        wide = dequantize(tensors, config, "float32", where)
        was_plain = {id(tensor) for tensor in tensors.values()}
        return {
            name: tensor if id(tensor) in was_plain else CastTensor(tensor, dtype, name, overflow)
            for name, tensor in wide.items()
        }
    dtype = dtype or "bfloat16"
    method = quant_method(config, where)
    if method == "fp8":
        return _from_fp8(tensors, _fp8_block(quantization(config), where), dtype, where)
    return _from_mxfp4(tensors, dtype, where) if method == "mxfp4" else dict(tensors)


def _fp8_block(quantization: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise UnsupportedInput(
            f"{where}: fp8 weights with weight_block_size {block!r}; only blocks of rows and columns are supported"
        )
    return block[0], block[1]


def _from_fp8(
    tensors: Mapping[str, LazyTensor], block: tuple[int, int], dtype: str, where: str
) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE_INV) and name.removesuffix(_SCALE_INV) in tensors:
            continue
        scales = tensors.get(name + _SCALE_INV)
        if tensor.dtype == "float8_e4m3fn" and scales is None:
            raise TensorMismatch(f"{where}: {name} is fp8, and there is no {name}{_SCALE_INV}")
        if scales is None:
            found[name] = tensor
            continue
        rows, cols = matrix_shape(tensor.shape)
        grid = (-(-rows // block[0]), -(-cols // block[1]))
        if tensor.dtype != "float8_e4m3fn" or scales.dtype != "float32" or tuple(scales.shape) != grid:
            raise TensorMismatch(
                f"{where}: {name} is {list(tensor.shape)} {tensor.dtype} with scales {list(scales.shape)} {scales.dtype}; "
                f"expected float8_e4m3fn with {list(grid)} float32"
            )
        found[name] = Fp8Tensor(tensor, scales, block, dtype)
    return found


def _from_mxfp4(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if not name.endswith(_BLOCKS):
            found[name] = tensor
            continue
        whole = name.removesuffix(_BLOCKS)
        scales, shape = tensors.get(whole + _SCALES), tuple(tensor.shape)
        if scales is None:
            raise TensorMismatch(f"{where}: there is no {whole}{_SCALES} to {name}")
        as_expected = {tensor.dtype, scales.dtype} == {"uint8"} and shape == (*scales.shape, _GROUP // 2)
        if not as_expected or len(shape) < 3:
            raise TensorMismatch(
                f"{where}: {name} is {list(shape)} {tensor.dtype} with scales {list(scales.shape)} {scales.dtype}; "
                f"expected [..., in / {_GROUP}, {_GROUP // 2}] and [..., in / {_GROUP}], both uint8"
            )
        *outer, groups, _ = shape
        packed = reshaped(tensor, (prod(outer), groups * _GROUP // 2))
        found[whole] = Mxfp4Tensor(packed, scales, (*outer, groups * _GROUP), dtype)
    return found


@cache
def _fp8_values() -> Floats:
    """Of all 256 bytes: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, and one NaN of either sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6)) * np.where(code > 127, -1, 1)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


@cache
def _fp4_pairs() -> Floats:
    """[256, 2]: what the low and the high four bits of a byte mean."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([positive, -positive])
    code = np.arange(256)
    return np.stack([values[code & 15], values[code >> 4]], axis=1)


@cache
def _powers() -> Floats:
    """2 ^ (scale - 127) of all 256 scales."""
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)
