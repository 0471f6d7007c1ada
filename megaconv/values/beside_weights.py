"""Tensors that belong to a quantized weight, such as its scales."""

from collections.abc import Mapping

from formats.tensor import LazyTensor, Shape
from megaconv.errors import TensorMismatch


def needed(name: str, tensors: Mapping[str, LazyTensor], where: str) -> LazyTensor:
    """The tensor of this name. Raises TensorMismatch if there is none. where: the file, for messages."""
    found = tensors.get(name)
    if found is None:
        raise TensorMismatch(f"{where}: there is no {name}", code="missing-tensor")
    return found


def fitting(
    name: str, tensors: Mapping[str, LazyTensor], shape: Shape, dtype: str, where: str
) -> LazyTensor:
    """The tensor of this name, shape and dtype. Raises TensorMismatch if it is missing or another one."""
    found = needed(name, tensors, where)
    if (tuple(found.shape), found.dtype) != (shape, dtype):
        raise TensorMismatch(
            f"{where}: {name} is {list(found.shape)} {found.dtype}; expected {list(shape)} {dtype}",
            code="misshapen-tensor",
        )
    return found


def require_one_form(name: str, stored: str, tensors: Mapping[str, LazyTensor], where: str) -> None:
    """Raise TensorMismatch if a weight is there as a plain tensor too.

    name: the plain tensor's name. stored: the name of the tensor that holds the quantized weight.
    """
    if name in tensors:
        raise TensorMismatch(
            f"{where}: holds {name} and {stored}, two forms of one weight; remove the one that is wrong"
        )
