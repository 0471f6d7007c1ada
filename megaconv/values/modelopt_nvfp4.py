"""Reads the weights of ModelOpt's unified checkpoints in NVFP4 as plain weights.

    X.weight [out, in / 2] uint8, X.weight_scale [out, in / 16] float8_e4m3fn, X.weight_scale_2 float32: two values a byte,
    the low four bits first, times (the scale of 16 * weight_scale_2)

Source: checkpoints of nvidia-modelopt 0.47.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from formats.tensor import LazyTensor, matrix_shape
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.values import modelopt
from megaconv.values.four_bits import NVFP4_GROUP, NvFp4Tensor
from megaconv.values.settings import value_of, weights_of_groups

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
"""ModelOpt's names of algorithms whose weights are NVFP4."""
_NVFP4_SCALE, _NVFP4_SCALE_2 = "_scale", "_scale_2"


def require_nvfp4(quantization: Mapping[str, Any], where: str) -> None:
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
    if algorithm not in ALGORITHMS or sizes != {NVFP4_GROUP}:
        found = ", ".join(map(str, sizes))
        raise UnsupportedInput(
            f"{where}: weights quantized by ModelOpt as {algorithm!r:.40} in groups of {found}; "
            f"only NVFP4 in groups of {NVFP4_GROUP}, {', '.join(modelopt.FORMS)} are supported"
        )


def dequantize(tensors: Mapping[str, LazyTensor], dtype: str, where: str) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of packed ones and their scales.

    Raises TensorMismatch if a scale is missing or doesn't fit.
    """
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
