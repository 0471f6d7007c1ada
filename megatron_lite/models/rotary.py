"""Rotary positions: the angles of a configuration, scaled or not, and the rotation of heads by halves."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.planning.mixers import in_layer
from megatron_lite.models.trainable import check_rope_scaling, rotated_width


def frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair of elements, float32 [rotated / 2].

    Sources: llama3 scaling from Llama 3.1's reference implementation, yarn from arXiv 2309.00071, proportional angles
    from transformers 5.24.
    Raises NotExpressible for other kinds of scaling.
    """
    rotated = rotated_width(config)
    scaling, base = config.positions.scaling, config.positions.theta
    if scaling is not None:
        check_rope_scaling(scaling["rope_type"])
        if scaling["rope_type"] == "ntk_alpha":
            base, scaling = base * scaling["alpha"] ** (rotated / (rotated - 2)), None
    plain: Tensor = 1.0 / base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / float(scaling["factor"])
    if scaling["rope_type"] == "proportional":
        return _proportional(plain, scaling)
    if scaling["rope_type"] == "yarn":
        return _yarn(plain, scaling, config.positions.theta)
    factor, original, low, high = (
        float(scaling[name])
        for name in (
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        )
    )
    # Turns over the original length. Pairs with many turns keep their angle; the angle of pairs with few turns is
    # divided by factor.
    turns = original * plain / (2 * math.pi)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _proportional(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return the angles of a whole head, of which only the first share of the pairs rotates."""
    rotating = int(scaling.get("partial_rotary_factor", 1.0) * 2 * len(plain) // 2)
    scaled = plain / float(scaling.get("factor", 1.0))
    return scaled.where(torch.arange(len(plain)) < rotating, torch.zeros(()))


def _yarn(plain: Tensor, scaling: Mapping[str, Any], theta: float) -> Tensor:
    """Return yarn's angles. Pairs with many turns are unchanged, pairs with few turns are stretched, with a ramp in between."""
    pairs = len(plain)
    first, last = _ramp(scaling, theta, pairs)
    # 0 up to pair `first`, 1 from pair `last` on, linear in between.
    width = (last - first) or 0.001
    stretched = ((torch.arange(pairs) - first) / width).clamp(0, 1)
    short = plain / float(scaling["factor"])
    return plain * (1 - stretched) + short * stretched


def _ramp(scaling: Mapping[str, Any], theta: float, pairs: int) -> tuple[float, float]:
    """Return the indices of the pairs between which yarn's ramp lies."""
    original = float(scaling["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        """Return the index of the pair that makes this number of turns over the original length."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, 2 * pairs - 1)


def magnitude(config: ModelConfig) -> float:
    """Return yarn's factor of cos and sin, which keeps attention as sharp as before scaling."""
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    factor = scaling["factor"]
    mscale = scaling.get("mscale")
    mscale_all_dim = scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return sharper(factor, mscale) / sharper(factor, mscale_all_dim)
    return sharper(factor, 1.0)


def sharper(factor: float, strength: float) -> float:
    """Return yarn's correction for a context that is `factor` times as long."""
    return 0.1 * float(strength) * math.log(max(float(factor), 1.0)) + 1.0


def usual_positions(config: ModelConfig) -> ModelConfig:
    """Return the config for the angles of all layers, or of those without a window if others have their own."""
    has_two = config.positions.local_theta is not None
    usual = (kind for kind in config.layers if not has_two or kind.window is None)
    return in_layer(config, next(usual, config.layers[0]))


def local_positions(config: ModelConfig) -> ModelConfig | None:
    """Return the config for the angles of layers with a window; None: they rotate like all others.

    These angles are not scaled.
    """
    positions = config.positions
    if positions.local_theta is None:
        return None
    windowed = (kind for kind in config.layers if kind.window is not None)
    local = in_layer(config, next(windowed, config.layers[0]))
    share, own = positions.rotary_percent, positions.local_rotary_percent
    fields = {
        "positions.theta": positions.local_theta,
        "positions.rotary_percent": share if own is None else own,
        "positions.scaling": None,
    }
    return changed(local, fields)


class Rotary:
    """Computes cos and sin of any positions."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        angles = frequencies(config).to(device)
        # A negative angle rotates in the other direction.
        self._frequencies = -angles if config.positions.backwards else angles
        self._dtype, self._magnitude = dtype, magnitude(config)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin [sequence, batch or 1, 1, rotated] for `rotate`.

        positions: int64 [sequence, batch or 1], or [sequence, batch, rotated / 2] with a position for each pair.
        """
        of_pairs = positions if positions.dim() == 3 else positions[..., None]
        angles = of_pairs.float()[..., None, :] * self._frequencies
        cos, sin = ((x * self._magnitude).to(self._dtype) for x in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def neighbours_apart(x: Tensor, rotated: int) -> Tensor:
    """Reorder the first elements of each head from interleaved pairs to halves: even places first, as `rotate` expects."""
    return torch.cat((x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of x [sequence, batch, heads, head_dim]: the first elements form two halves; the rest is unchanged.

    cos, sin: for both halves; the sin of the first half is negated.
    """
    if torch.compiler.is_compiling() or not x.requires_grad:
        return _turned(x, cos, sin)
    result: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _Turn(torch.autograd.Function):
    """Rotation, whose backward pass rotates the other way. This takes one operation less than autograd's backward pass."""

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
    # The roll gives (x2, x1). The first half of sin is negated.
    return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)
