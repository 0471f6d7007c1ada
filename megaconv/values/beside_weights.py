"""Tensors that belong to a quantized weight, such as its scales."""

from collections.abc import Mapping

from formats.tensor import LazyTensor
from megaconv.errors import TensorMismatch


def needed(name: str, tensors: Mapping[str, LazyTensor], where: str) -> LazyTensor:
    """The tensor of this name. Raises TensorMismatch if there is none. where: the file, for messages."""
    found = tensors.get(name)
    if found is None:
        raise TensorMismatch(f"{where}: there is no {name}", code="missing-tensor")
    return found
