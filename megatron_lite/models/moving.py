"""Copies of tensors to a device."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. A copy from pageable memory to a GPU would wait for the work that is queued there."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
