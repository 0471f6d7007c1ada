"""What passes between two stages of a pipeline: one tensor or several, of shapes that the chunks of both sides know."""

from typing import NamedTuple

import torch
from torch import Tensor

Payload = tuple[Tensor, ...]
"""Of one microbatch. Empty in front of the first stage; behind the last the loss alone."""

MOST_TENSORS = 8
"""Of a payload: what tags leave room for."""


class Wire(NamedTuple):
    """One tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back; numbers of tokens, say, have none."""
        return self.dtype.is_floating_point


Wires = tuple[Wire, ...]


def with_gradient(wires: Wires) -> Wires:
    """What comes back."""
    return tuple(wire for wire in wires if wire.has_gradient)
