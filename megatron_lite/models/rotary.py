"""Rotary positions: the angles of a configuration, scaled or not, and the rotation of heads by halves."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed


def frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, float32 [rotated / 2].

    Sources: of the llama3 rule Llama 3.1's reference implementation, of yarn arXiv 2309.00071. Raises NotExpressible for
    scaling of another kind.
    """
    rotated = config.latent.rope_dim or int(config.attention.head_dim * config.positions.rotary_percent)
    plain: Tensor = 1.0 / config.positions.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    scaling = config.positions.scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / float(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        return _yarn(plain, scaling, config.positions.theta)
    if scaling["rope_type"] != "llama3":
        raise NotExpressible(
            f"rope scaling {scaling['rope_type']!r} can't be trained with; supported: linear, llama3 and yarn"
        )
    factor, original, low, high = (
        float(scaling[name])
        for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    turns = original * plain / (2 * math.pi)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _yarn(plain: Tensor, scaling: Mapping[str, Any], theta: float) -> Tensor:
    """Pairs that turn often stay, those that hardly turn are stretched; in between a ramp by their number."""
    original = float(scaling["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        """The number of the pair that makes so many turns over the original length."""
        return len(plain) * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    stretched = ((torch.arange(len(plain)) - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain * (1 - stretched) + plain / float(scaling["factor"]) * stretched


def magnitude(config: ModelConfig) -> float:
    """What yarn multiplies cos and sin with, so that attention stays as sharp as it was."""
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    factor, both = scaling["factor"], (scaling.get("mscale"), scaling.get("mscale_all_dim"))
    return sharper(factor, both[0]) / sharper(factor, both[1]) if both[0] and both[1] else sharper(factor, 1.0)


def sharper(factor: float, strength: float) -> float:
    """yarn's correction of a context that is `factor` times as long."""
    return 0.1 * float(strength) * math.log(max(float(factor), 1.0)) + 1.0


def local_positions(config: ModelConfig) -> ModelConfig | None:
    """As frequencies and magnitude take it for layers with a window; None: these rotate as all others. Nothing scales them."""
    theta = config.positions.local_theta
    return None if theta is None else changed(config, {"positions.theta": theta, "positions.scaling": None})


class Rotary:
    """cos and sin of any positions."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies, self._dtype, self._magnitude = frequencies(config).to(device), dtype, magnitude(config)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [sequence, batch or 1, 1, rotated] as `rotate` takes them, of positions, int64 [sequence, batch or 1]."""
        angles = positions.float()[..., None, None] * self._frequencies
        cos, sin = ((x * self._magnitude).to(self._dtype) for x in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def neighbours_apart(x: Tensor, rotated: int) -> Tensor:
    """Of the first elements of each head, whose neighbours rotate together, those at even places first: as rotate wants pairs."""
    return torch.cat((x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim]: its first elements in two halves, each pair rotated; the rest stays.

    cos, sin: of both halves, the first one's sin with its sign changed.
    """
    if torch.compiler.is_compiling() or not x.requires_grad:
        return _turned(x, cos, sin)
    result: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _Turn(torch.autograd.Function):
    """Backward is a rotation the other way: one operation less than autograd finds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((_turned(x[..., :rotated], cos, sin), x[..., rotated:]), -1)
    return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)
