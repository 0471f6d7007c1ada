"""The interface of a cache to a mixer: what it keeps of a row's earlier tokens, so that later tokens don't compute it again."""

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """A cache for a pass. Mixers declare the parts that it keeps for each layer (mixers/declaration.py)."""

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Add tensors to the parts of a layer that grow. Returns all of each part, [tokens so far, batch, heads, width].

        new: one tensor for each PerToken, [new tokens, batch, heads, width], at the positions of the pass. Entry j has
        position j; a query attends to entries up to its own position. Rows may have different lengths. Elements after a
        row's last position are never used, but have to be finite.
        """

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return one tensor for each PerRow of a layer: the states of the pass's rows, [batch, ...]. A row begins with zeros."""

    def keep(self, layer: int, *states: Tensor) -> None:
        """Replace the states of the pass's rows."""
