"""The declaration of a mixer: everything that other parts of the trainer ask about a mixer without computing it.

Declarations don't import torch, so that `plan` works without torch. A new mixer is a module that computes it, a
declaration, and an entry in `table.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megaconv.model.config import ModelConfig
from megaconv.planning.mixers import MixerCost

if TYPE_CHECKING:
    from torch import nn


class PerToken(NamedTuple):
    """A part of a cache that grows with the row: one vector per token and head, such as keys."""

    heads: int
    """Heads of this rank."""
    width: int


class PerRow(NamedTuple):
    """A part of a cache with a fixed size, whatever the row's length: the state of a convolution or a recurrence.

    A row begins with zeros.
    """

    shape: tuple[int, ...]
    """The shape of one row's state on this rank."""
    in_float32: bool = False
    """True: float32; False: the model's dtype."""


Kept = PerToken | PerRow


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """One kind of mixer. Sizes are those of the whole model, unless they are the rank's own `sizes`."""

    module: Callable[[], "Callable[..., nn.Module]"] | None
    """Imports the class that computes it: class(plan, layer), with forward(x, run). None: the trainer can't compute it."""
    place: str = "self_attention"
    """The name of the module in a layer, as in Megatron core."""
    in_float32: frozenset[str] = frozenset()
    """The names of trained parameters that stay in float32, whatever the model's dtype."""
    cache: Callable[[ModelConfig, Mapping[str, int]], tuple[Kept, ...]]
    """(model, sizes of this rank) -> the parts of a row's cache in generation."""
    matrices: Callable[[ModelConfig], tuple[str, ...]]
    """The matrices that have an extra state in Megatron's checkpoints: the last matrix first."""
    cost: MixerCost
    """The declaration of what it keeps, computes and exchanges."""

    @property
    def needs_norm(self) -> bool:
        """True if the layer norms the mixer's input; False if the mixer contains its norm."""
        return self.cost.needs_norm

    @property
    def attends(self) -> bool:
        """True if tokens attend to the keys of all earlier tokens, which context-parallel ranks exchange."""
        return self.cost.attends
