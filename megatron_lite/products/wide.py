"""Float32 for what less precision would spoil."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float32. A float64 tensor stays as it is, so that a model in float64 has no rounding of float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
