"""Biases of zeros that GPTQ's tools store beside each matrix, also of a model without biases.

AutoGPTQ made every quantized layer with a bias. Published models have them, such as Llama 2 and Qwen 2.5. A bias of zeros
changes no output, so that the model is the same without it.
"""

import logging
from collections.abc import Iterable, Mapping

from formats.tensor import LazyTensor, read_tensor

_log = logging.getLogger("megaconv")

_BIAS, _WEIGHT = ".bias", ".weight"


def without_zero_biases(
    tensors: Mapping[str, LazyTensor], expected: Iterable[str], where: str
) -> dict[str, LazyTensor]:
    """The tensors without the biases of zeros that the model doesn't have.

    expected: the names of the model's tensors. A bias that holds another number stays, and is an unknown tensor.
    """
    names = set(expected)
    left_out = {
        name for name, tensor in tensors.items() if _is_added(name, names) and _is_zero(tensor)
    }
    if left_out:
        _log.warning(
            "%s: %d biases of zeros are left out: the model has none", where, len(left_out)
        )
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def _is_added(name: str, expected: set[str]) -> bool:
    """True for the bias of a matrix that has none in the model."""
    weight = name.removesuffix(_BIAS) + _WEIGHT
    return name.endswith(_BIAS) and name not in expected and weight in expected


def _is_zero(tensor: LazyTensor) -> bool:
    return len(tensor.shape) == 1 and not read_tensor(tensor).any()
