"""Copies of the saved tensors in main memory, so that training continues during a save. The next save reuses the buffers."""

from typing import Any

import torch
from torch import Tensor

_CUDA: Any = torch.cuda  # its classes have no type hints


class Copies:
    """The copies of one save at a time.

    The GPU copies its tensors into pinned memory, after the work that is already queued and before the next step. Only
    the thread that writes the checkpoint waits for the copies.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        """The buffers in the order in which a save requests them; every save uses the same order."""
        self._used = 0
        self._made: Any = None
        """A CUDA event recorded after the last copy."""
        self._device: torch.device | None = None
        """The GPU of the copied tensors."""

    def begin(self) -> None:
        """Start a new save. The previous save must be written already."""
        self._used, self._made = 0, None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the buffer for the tensor's copy. The buffer is filled after wait()."""
        pinned = tensor.is_cuda
        if pinned:
            self._device = tensor.device
        if self._used == len(self._buffers):
            self._buffers.append(_buffer(tensor, pinned=pinned))
        buffer = self._buffers[self._used]
        if (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[self._used] = _buffer(tensor, pinned=pinned)
        self._used += 1
        return buffer.copy_(tensor.detach(), non_blocking=pinned)

    def end(self) -> None:
        """Mark that all copies of this save are requested."""
        if any(buffer.is_pinned() for buffer in self._buffers[: self._used]):
            self._made = _CUDA.Event()
            self._made.record()

    def wait(self) -> None:
        """Wait until all copies are complete. May be called from any thread."""
        if self._made is None:
            return
        # A new thread has the device cuda:0. Without this region, its first call would take memory there, on every rank.
        with _CUDA.device(self._device):
            self._made.synchronize()


def _buffer(tensor: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
