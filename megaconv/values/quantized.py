"""Dequantizes weights block by block while they are read. All arithmetic is numpy's.

    FP8, and FP4 of DeepSeek V4     `fp8.py`
    FBGEMM's FP8 (Llama 3.1 405B)   x.weight [out, in] float8_e4m3fn, x.weight_scale [out, 1] float32: as ModelOpt's by rows
    NVFP4 (ModelOpt)                x.weight [out, in / 2] uint8, x.weight_scale [out, in / 16] float8_e4m3fn, x.weight_scale_2
                                    float32: two values a byte, the low four bits first, times (the scale of 16 * weight_scale_2)
    MXFP4 (GPT-OSS)                 x_blocks [..., in / 32, 16] uint8, x_scales [..., in / 32] uint8:
                                    two values a byte, the low four bits first, times 2 ^ (scale - 127)
    ModelOpt's FP8, INT8, INT4      `modelopt.py`
    compressed-tensors              `compressed_tensors.py`
    GPTQ, AWQ                       `gptq.py`
    bitsandbytes                    `bitsandbytes.py`

Products are computed in float32, where they are exact or rounded once, and then rounded to nearest even. `four_bits.py` has
those of 4 bits.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from formats.tensor import LazyTensor, matrix_shape, reshaped
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.families.parts.hf_config import MLX, quant_method, quantization
from megaconv.values import compressed_tensors, fp8, modelopt
from megaconv.values.beside_weights import require_one_form
from megaconv.values.cast import CastTensor
from megaconv.values.four_bits import MXFP4_GROUP, NVFP4_GROUP, Mxfp4Tensor, NvFp4Tensor
from megaconv.values.settings import value_of, weights_of_groups

_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_BY_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
"""ModelOpt's name of the form that FBGEMM's weights have too."""
_NVFP4_SCALE, _NVFP4_SCALE_2 = "_scale", "_scale_2"


def dequantize(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    dtype: str | None,
    where: str,
    *,
    overflow: bool = False,
) -> dict[str, LazyTensor]:
    """The same tensors, with plain tensors in place of quantized ones and their scales.

    config: config.json. dtype: the dtype of dequantized tensors; None: bfloat16. overflow: for float16, as in
    CastTensor.
    Raises UnsupportedInput for another method, TensorMismatch for scales that are missing or don't fit.
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
    if method == MLX:
        raise UnsupportedInput(
            f"{where}: the weights are quantized by MLX, which `--loader mlx` reads; megaconv finds that loader by itself"
        )
    if method == "fp8":
        return fp8.dequantize(tensors, fp8.block_of(quantization(config), where), dtype, where)
    if method == "fbgemm_fp8":
        return modelopt.dequantize(tensors, modelopt.FORMS[_FP8_BY_ROWS], dtype, where)
    if method == "modelopt":
        settings = quantization(config)
        form = modelopt.form_of(settings)
        if form is not None:
            return modelopt.dequantize(tensors, form, dtype, where)
        _require_nvfp4(settings, where)
        return _from_nvfp4(tensors, dtype, where)
    # Few models need these modules, and every conversion would wait for them.
    if method == "bitsandbytes":
        from megaconv.values import bitsandbytes

        return bitsandbytes.dequantize(tensors, dtype, where)
    if method in ("gptq", "awq"):
        from megaconv.values import gptq

        packing = gptq.settings_of(method, quantization(config), where)
        return gptq.dequantize(tensors, packing, dtype, where)
    if method == "compressed-tensors":
        return compressed_tensors.dequantize(tensors, quantization(config), dtype, where)
    return _from_mxfp4(tensors, dtype, where) if method == "mxfp4" else dict(tensors)


def _from_mxfp4(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if not name.endswith(_BLOCKS):
            found[name] = tensor
            continue
        whole = name.removesuffix(_BLOCKS)
        require_one_form(whole, name, tensors, where)
        scales, shape = tensors.get(whole + _SCALES), tuple(tensor.shape)
        if scales is None:
            raise TensorMismatch(f"{where}: there is no {whole}{_SCALES} to {name}")
        as_expected = {tensor.dtype, scales.dtype} == {"uint8"} and shape == (
            *scales.shape,
            MXFP4_GROUP // 2,
        )
        if not as_expected or len(shape) < 3:
            raise TensorMismatch(
                f"{where}: {name} is {list(shape)} {tensor.dtype} with scales {list(scales.shape)} {scales.dtype}; "
                f"expected [..., in / {MXFP4_GROUP}, {MXFP4_GROUP // 2}] and [..., in / {MXFP4_GROUP}], both uint8"
            )
        *outer, groups, _ = shape
        packed = reshaped(tensor, (prod(outer), groups * MXFP4_GROUP // 2))
        found[whole] = Mxfp4Tensor(packed, scales, (*outer, groups * MXFP4_GROUP), dtype)
    return found


def _require_nvfp4(quantization: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedInput for another algorithm of ModelOpt, or for another group size."""
    algorithm = quantization.get("quant_algo")
    inside = f"{where}: quantization_config"
    settings = {inside: quantization}
    if isinstance(quantization.get("config_groups"), Mapping):
        settings = weights_of_groups(quantization, inside)
    sizes = {
        value_of(each, "group_size", int, path)
        for path, each in settings.items()
        if each.get("group_size") is not None
    } or {NVFP4_GROUP}
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or sizes != {NVFP4_GROUP}:
        found = ", ".join(map(str, sizes))
        raise UnsupportedInput(
            f"{where}: weights quantized by ModelOpt as {algorithm!r:.40} in groups of {found}; "
            f"only NVFP4 in groups of {NVFP4_GROUP}, {', '.join(modelopt.FORMS)} are supported"
        )


def _from_nvfp4(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    of_activations = modelopt.scales_of_activations(tensors, where)
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
            raise TensorMismatch(
                f"{where}: {name} is packed, and there is no {missing}", code="missing-tensor"
            )
        rows, half = matrix_shape(tensor.shape)
        grid = (rows, 2 * half // NVFP4_GROUP)
        fits = (
            tuple(scales.shape) == grid and prod(scale.shape) == 1 and 2 * half % NVFP4_GROUP == 0
        )
        if (scales.dtype, scale.dtype) != ("float8_e4m3fn", "float32") or not fits:
            raise TensorMismatch(
                f"{where}: {name} is {list(tensor.shape)} uint8 with scales {list(scales.shape)} {scales.dtype} and {list(scale.shape)} "
                f"{scale.dtype}; expected {list(grid)} float8_e4m3fn and one float32",
                code="misshapen-tensor",
            )
        found[name] = NvFp4Tensor(tensor, scales, scale, (rows, 2 * half), dtype)
    return found
