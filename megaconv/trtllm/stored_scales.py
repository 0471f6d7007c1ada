"""Matrices in FP8 in TensorRT-LLM's checkpoints as plain ones, by the scales beside them. `scales.py` says what these are."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from formats.tensor import LazyTensor, matrix_shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.values.cast import CastTensor
from megaconv.values.code_tensors import READ_AS
from megaconv.values.scaled import ScaledTensor

INPUTS_SCALE, WEIGHTS_SCALE = "activation_scaling_factor", "weights_scaling_factor"
_OF_ACTIVATIONS = (INPUTS_SCALE, "kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")
"""The last parts of the names of scales that belong to no weight."""
CODES = "float8_e4m3fn"


def dequantized(
    tensors: Mapping[str, LazyTensor], where: str, dtype: str = READ_AS
) -> dict[str, LazyTensor]:
    """The tensors of a rank, with plain values of this dtype for matrices in FP8, without scales of weights.

    where: the file, for messages. Raises TensorMismatch for a scale that is missing or doesn't fit.
    """
    scales = set(_scales_of_weights(tensors))
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name, tensor in plain.items():
        if tensor.dtype == CODES:
            plain[name] = _plain(name, tensors, where, dtype)
    return plain


def scales_of_activations(names: Iterable[str]) -> set[str]:
    """The names of the scales that belong to no weight. Plain weights may have those of a quantized cache."""
    return {name for name in names if name.rpartition(".")[2] in _OF_ACTIVATIONS}


def _scales_of_weights(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield the scales whose weight is there."""
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last == WEIGHTS_SCALE and f"{module}.weight" in tensors:
            yield name


def _plain(name: str, tensors: Mapping[str, LazyTensor], where: str, dtype: str) -> LazyTensor:
    stored = tensors[name]
    scale_name = f"{name.removesuffix('.weight')}.{WEIGHTS_SCALE}"
    scale = tensors.get(scale_name)
    if scale is None:
        raise TensorMismatch(
            f"{where}: {name} is {CODES}, and there is no {scale_name}", code="missing-tensor"
        )
    if len(stored.shape) != 2 or prod(scale.shape) != 1 or scale.dtype != "float32":
        raise TensorMismatch(
            f"{where}: {name} is {list(stored.shape)} with scales {list(scale.shape)} {scale.dtype}; "
            "expected a matrix with one float32",
            code="misshapen-tensor",
        )
    read_as = "float32" if dtype == "float16" else dtype
    values = ScaledTensor(stored, reshaped(scale, (1, 1)), matrix_shape(stored.shape), read_as)
    return values if read_as == dtype else CastTensor(values, dtype, name, overflow=False)
