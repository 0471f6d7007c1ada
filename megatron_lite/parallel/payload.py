"""The message between two pipeline stages: one or more tensors. The chunks on both sides know their shapes."""

from typing import NamedTuple

import torch
from torch import Tensor

Payload = tuple[Tensor, ...]
"""The tensors of one microbatch: none before the first stage, only the loss after the last stage."""

MOST_TENSORS = 8
"""Largest number of tensors in a payload, for which message tags leave room."""


class Wire(NamedTuple):
    """Shape and dtype of one tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """True if a gradient is sent back. Integer tensors, such as token counts, have none."""
        return self.dtype.is_floating_point


Wires = tuple[Wire, ...]


def with_gradient(wires: Wires) -> Wires:
    """Return the wires whose gradients are sent back."""
    return tuple(wire for wire in wires if wire.has_gradient)
