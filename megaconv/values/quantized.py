"""Dequantizes weights block by block while they are read. All arithmetic is numpy's.

    FP8, and FP4 of DeepSeek V4     `fp8.py`
    FBGEMM's FP8 (Llama 3.1 405B)   x.weight [out, in] float8_e4m3fn, x.weight_scale [out, 1] float32: as ModelOpt's by rows
    MXFP4 (GPT-OSS)                 x_blocks [..., in / 32, 16] uint8, x_scales [..., in / 32] uint8:
                                    two values a byte, the low four bits first, times 2 ^ (scale - 127)
    ModelOpt's FP8, INT8, INT4      `modelopt.py`; NVFP4: `modelopt_nvfp4.py`; several in one model: `modelopt_mixed.py`
    compressed-tensors              `compressed_tensors.py`
    GPTQ, AWQ                       `gptq.py`
    bitsandbytes                    `bitsandbytes.py`

Products are computed in float32, where they are exact or rounded once, and then rounded to nearest even. `four_bits.py` has
those of 4 bits.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from formats.tensor import LazyTensor, reshaped
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.families.parts.hf_config import MLX, quant_method, quantization
from megaconv.values import compressed_tensors, fp8, modelopt, modelopt_mixed, modelopt_nvfp4
from megaconv.values.beside_weights import require_one_form
from megaconv.values.cast import CastTensor
from megaconv.values.four_bits import MXFP4_GROUP, Mxfp4Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_BY_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
"""ModelOpt's name of the form that FBGEMM's weights have too."""


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
        return _from_modelopt(tensors, quantization(config), dtype, where)
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


def _from_modelopt(
    tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any], dtype: str, where: str
) -> dict[str, LazyTensor]:
    form = modelopt.form_of(settings)
    if form is not None:
        return modelopt.dequantize(tensors, form, dtype, where)
    if modelopt_mixed.is_mixed(settings):
        return modelopt_mixed.dequantize(tensors, settings, dtype, where)
    modelopt_nvfp4.require_nvfp4(settings, where)
    return modelopt_nvfp4.dequantize(tensors, dtype, where)


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
