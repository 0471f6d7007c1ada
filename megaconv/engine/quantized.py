"""Quantized weights as plain ones, computed block by block while they are read; numpy does all the arithmetic.

    FP8 by blocks (DeepSeek-V3)     x.weight [out, in] float8_e4m3fn, x.weight_scale_inv [out / 128, in / 128] float32:
                                    value * the scale of its block; the last blocks of a row or column may be narrower
    NVFP4 (ModelOpt)                x.weight [out, in / 2] uint8, x.weight_scale [out, in / 16] float8_e4m3fn, x.weight_scale_2
                                    float32: two values a byte, the low four bits first, times (the scale of 16 * weight_scale_2)
    MXFP4 (GPT-OSS)                 x_blocks [..., in / 32, 16] uint8, x_scales [..., in / 32] uint8:
                                    two values a byte, the low four bits first, times 2 ^ (scale - 127)

Products are formed in float32, where both are exact or rounded once, and rounded to nearest even from there. Sources:
README_WEIGHTS.md and inference/kernel.py of DeepSeek-V3; the OCP Microscaling Formats specification, 1.0; nvidia-modelopt 0.47.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, read_tensor, reshaped
from megaconv.engine.cast import CastTensor
from megaconv.engine.rounding import rounded
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.families.parts.hf_config import quant_method, quantization
from megaconv.model.check import well_formed

_log = logging.getLogger("megaconv")

_SCALE_INV, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_GROUP = 32
"""Elements of MXFP4 that share a scale."""
_NVFP4_GROUP = 16
_NVFP4_SCALE, _NVFP4_SCALE_2 = "_scale", "_scale_2"
_OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale")
"""Ends of names of what calibration found of activations and of the cache."""


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


@dataclass(frozen=True)
class NvFp4Tensor:
    """[rows, cols] of 4 bit, two a byte, times the scale of each 16 of a row, times one of all."""

    packed: LazyTensor
    """[rows, cols / 2] bytes."""
    scales: LazyTensor
    """[rows, cols / 16] in float8_e4m3fn."""
    scale: LazyTensor
    """One float32."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.col0 // _NVFP4_GROUP, -(-box.col1 // _NVFP4_GROUP)
        packed = np.empty((box.rows, (last - first) * _NVFP4_GROUP // 2), np.uint8)
        self.packed.read_into(Box(box.row0, box.row1, first * _NVFP4_GROUP // 2, last * _NVFP4_GROUP // 2), packed)
        scales = np.empty((box.rows, last - first), np.uint8)
        self.scales.read_into(Box(box.row0, box.row1, first, last), scales)
        of_all = read_tensor(self.scale).view(np.float32)[0, 0]
        pairs = _nvfp4_pairs()[packed].reshape(box.rows, last - first, _NVFP4_GROUP)
        with np.errstate(over="ignore", invalid="ignore"):
            pairs *= (_fp8_values()[scales] * of_all)[:, :, None]
        cols = slice(box.col0 - first * _NVFP4_GROUP, box.col1 - first * _NVFP4_GROUP)
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
    if method == "modelopt":
        _require_nvfp4(quantization(config), where)
        return _from_nvfp4(tensors, dtype, where)
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


def _require_nvfp4(quantization: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedInput for another algorithm of ModelOpt's, and for groups of another size."""
    algorithm, groups = quantization.get("quant_algo"), quantization.get("config_groups")
    with well_formed(f"{where}: quantization_config"):
        settings = [group["weights"] for group in groups.values()] if isinstance(groups, Mapping) else [quantization]
        sizes = {each.get("group_size", _NVFP4_GROUP) for each in settings if isinstance(each, Mapping)}
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or sizes != {_NVFP4_GROUP}:
        raise UnsupportedInput(
            f"{where}: weights quantized by ModelOpt as {algorithm!r:.40} in groups of {', '.join(map(str, sizes))}; only NVFP4 "
            f"in groups of {_NVFP4_GROUP} is supported"
        )


def _from_nvfp4(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    of_activations = [name for name in tensors if name.endswith(_OF_ACTIVATIONS)]
    if of_activations:
        _log.warning(
            "%s: %d scales of activations are left out: the weights are plain ones", where, len(of_activations)
        )
    for name, tensor in tensors.items():
        weight = name.removesuffix(_NVFP4_SCALE_2).removesuffix(_NVFP4_SCALE)
        if name in of_activations or (weight != name and weight in tensors):
            continue
        if tensor.dtype != "uint8":
            found[name] = tensor
            continue
        scales, scale = tensors.get(name + _NVFP4_SCALE), tensors.get(name + _NVFP4_SCALE_2)
        if scales is None or scale is None:
            missing = name + (_NVFP4_SCALE if scales is None else _NVFP4_SCALE_2)
            raise TensorMismatch(f"{where}: {name} is packed, and there is no {missing}", code="missing-tensor")
        rows, half = matrix_shape(tensor.shape)
        grid = (rows, 2 * half // _NVFP4_GROUP)
        fits = tuple(scales.shape) == grid and prod(scale.shape) == 1 and 2 * half % _NVFP4_GROUP == 0
        if (scales.dtype, scale.dtype) != ("float8_e4m3fn", "float32") or not fits:
            raise TensorMismatch(
                f"{where}: {name} is {list(tensor.shape)} uint8 with scales {list(scales.shape)} {scales.dtype} and {list(scale.shape)} "
                f"{scale.dtype}; expected {list(grid)} float8_e4m3fn and one float32",
                code="misshapen-tensor",
            )
        found[name] = NvFp4Tensor(tensor, scales, scale, (rows, 2 * half), dtype)
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
def _nvfp4_pairs() -> Floats:
    """The same, without the minus of a zero, as ModelOpt has it."""
    return _fp4_pairs() + np.float32(0)


@cache
def _powers() -> Floats:
    """2 ^ (scale - 127) of all 256 scales."""
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)
