"""Copies in main memory of what is saved while training goes on, in buffers that the next save uses again."""

from typing import Any

import torch
from torch import Tensor

_CUDA: Any = torch.cuda  # whose classes have no types


class Copies:
    """Of one save at a time.

    From a GPU they are made by the GPU, into pinned memory, between what it had to do before and the next step: nobody waits for
    them but whoever writes them.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        """In the order in which a save asks for them, which is the same every time."""
        self._used = 0
        self._made: Any = None
        """An event of the GPU's, after the last."""

    def begin(self) -> None:
        """A new save; the one before has been written."""
        self._used, self._made = 0, None

    def of(self, tensor: Tensor) -> Tensor:
        """What will be the tensor's copy."""
        pinned = tensor.is_cuda
        if self._used == len(self._buffers):
            self._buffers.append(_buffer(tensor, pinned=pinned))
        buffer = self._buffers[self._used]
        if (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[self._used] = _buffer(tensor, pinned=pinned)
        self._used += 1
        return buffer.copy_(tensor.detach(), non_blocking=pinned)

    def end(self) -> None:
        """All are asked for."""
        if any(buffer.is_pinned() for buffer in self._buffers[: self._used]):
            self._made = _CUDA.Event()
            self._made.record()

    def wait(self) -> None:
        """Until they are what they copy; in any thread."""
        if self._made is not None:
            self._made.synchronize()


def _buffer(tensor: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
