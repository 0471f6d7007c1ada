"""Rotary positions: the angles of a configuration, scaled or not, and the rotation of heads by halves."""

import math
from typing import Any

import torch
from torch import Tensor

from megaconv.config import ModelConfig
from megaconv.errors import NotExpressible


def frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, float32 [rotated / 2].

    Source of the llama3 rule: Llama 3.1's reference implementation. Raises NotExpressible for scaling of another kind.
    """
    rotated = int(config.head_dim * config.rotary_percent)
    plain: Tensor = 1.0 / config.rope_theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / float(scaling["factor"])
    if scaling["rope_type"] != "llama3":
        raise NotExpressible(
            f"rope scaling {scaling['rope_type']!r} can't be trained with; known are linear and llama3"
        )
    factor, original, low, high = (
        float(scaling[name])
        for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    turns = original * plain / (2 * math.pi)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


class Rotary:
    """cos and sin for one pass; made once, used by every layer."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies, self._dtype = frequencies(config).to(device), dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos, sin [sequence, batch or 1, 1, rotated / 2]. positions int64 [batch, sequence] or None."""
        if positions is not None:
            return self._tables(positions.t())
        if length not in self._made:
            self._made[length] = self._tables(torch.arange(length, device=self._frequencies.device).unsqueeze(1))
        return self._made[length]

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None, None] * self._frequencies
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim]: its first elements in two halves, each pair turned; the rest stays."""
    if torch.compiler.is_compiling():
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    turned: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Turn(torch.autograd.Function):
    """What a compiler makes of the formula: no copies in between, and backward is a turn the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = x.new_empty(x.shape)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
