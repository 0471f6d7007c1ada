"""Reads ModelOpt's checkpoints whose layers have algorithms of their own (`MIXED_PRECISION`), and those without any.

    quantized_layers: {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                       "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}, ...}

An entry holds for the module and for all modules in it. Modules without an entry are plain. A checkpoint without an
algorithm has plain weights and a quantized key/value cache. Source: quant_utils.py and convert_hf_config.py of
nvidia-modelopt 0.47.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import TensorMismatch
from megaconv.values import modelopt, modelopt_nvfp4
from megaconv.values.settings import value_of

_ALGORITHM, _LAYERS, _MIXED = "quant_algo", "quantized_layers", "MIXED_PRECISION"
_QUANTIZED_DTYPES = ("float8_e4m3fn", "int8", "uint8")


def is_mixed(settings: Mapping[str, Any]) -> bool:
    """True for algorithms by layer, and for no algorithm at all."""
    algorithm = settings.get(_ALGORITHM)
    return algorithm == _MIXED or (algorithm is None and not settings.get("config_groups"))


def algorithms_of(settings: Mapping[str, Any], where: str) -> list[str]:
    """The names of all algorithms, sorted."""
    return sorted({each[_ALGORITHM] for each in _layers(settings, where).values()})


def dequantize(
    tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any], dtype: str, where: str
) -> dict[str, LazyTensor]:
    """The same tensors, with plain weights of this dtype in place of quantized ones and their scales.

    Raises UnsupportedInput for another algorithm, TensorMismatch if a scale is missing, doesn't fit, or has no entry.
    """
    layers = _layers(settings, where)
    left_out = set(modelopt.scales_of_activations(tensors, where))
    by_algorithm: defaultdict[str, dict[str, LazyTensor]] = defaultdict(dict)
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name in left_out:
            continue
        algorithm = _algorithm_of(name, layers)
        if algorithm is not None:
            by_algorithm[algorithm][name] = tensor
            continue
        if tensor.dtype in _QUANTIZED_DTYPES:
            raise TensorMismatch(
                f"{where}: {name} is {tensor.dtype}, and no entry of {_LAYERS} in quantization_config names its module"
            )
        found[name] = tensor
    for algorithm, part in by_algorithm.items():
        form = modelopt.FORMS.get(algorithm)
        if form is None:
            found |= modelopt_nvfp4.dequantize(part, dtype, where)
        else:
            found |= modelopt.dequantize(part, form, dtype, where)
    return found


def _layers(settings: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The settings of each quantized module. Raises UnsupportedInput for another algorithm or group size."""
    if settings.get(_ALGORITHM) is None:
        return {}
    inside = f"{where}: quantization_config"
    layers = value_of(settings, _LAYERS, dict, inside)
    found = {name: value_of(layers, name, dict, f"{inside}.{_LAYERS}") for name in layers}
    for name, layer in found.items():
        algorithm = value_of(layer, _ALGORITHM, str, f"{inside}.{_LAYERS}.{name}")
        if algorithm not in modelopt.FORMS:
            modelopt_nvfp4.require_nvfp4(layer, where)
    return found


def _algorithm_of(name: str, layers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The algorithm of a tensor's module, or of the nearest module around it."""
    module = name.rpartition(".")[0]
    while module:
        if module in layers:
            return str(layers[module][_ALGORITHM])
        module = module.rpartition(".")[0]
    return None
