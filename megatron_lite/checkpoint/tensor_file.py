"""A safetensors file that is not written yet."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from formats.safetensors import SafetensorsLayout


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file of float32 tensors in main memory. It holds no copy of them."""

    tensors: Mapping[str, Tensor]

    @cached_property
    def _layout(self) -> SafetensorsLayout:
        return SafetensorsLayout(
            {name: (tuple(tensor.shape), "float32") for name, tensor in self.tensors.items()}
        )

    def __len__(self) -> int:
        """Return the size in bytes."""
        return self._layout.size

    def __bytes__(self) -> bytes:
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content in order, a tensor at a time."""
        for _, header in self._layout.headers({}):
            yield header
        for tensor in self.tensors.values():
            if tensor.numel():
                yield tensor.contiguous().view(-1).numpy().data.cast("B")
