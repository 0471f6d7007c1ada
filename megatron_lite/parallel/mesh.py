"""Numbers ranks along named axes: pure arithmetic of places and neighbours.

    dense parameters    rank = tp + TP * (cp + CP * (dp + DP * pp))
    experts             rank = etp + ETP * (ep + EP * (edp + EDP * pp)), the same ranks of a stage in another division

This is Megatron's order (megatron/core/parallel_state.py): tensor ranks are neighbours, stages are furthest apart.
"""

from dataclasses import dataclass
from itertools import product

from megaconv.model.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The axes by name with their sizes, the fastest axis first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        total = 1
        for _, count in self.axes:
            total *= count
        return total

    def place(self, rank: int) -> dict[str, int]:
        """Return the rank's index along each axis."""
        found = {}
        for name, count in self.axes:
            rank, found[name] = divmod(rank, count)
        return found

    def rank(self, place: dict[str, int]) -> int:
        """Return the rank at a place; the inverse of place()."""
        found = 0
        for name, count in reversed(self.axes):
            found = found * count + place[name]
        return found

    def groups(self, *names: str) -> list[list[int]]:
        """Return all ranks in groups that differ only along these axes, in the order of the mesh's axes, fastest first."""
        fixed = [range(1) if name in names else range(count) for name, count in reversed(self.axes)]
        free = [range(count) if name in names else range(1) for name, count in reversed(self.axes)]
        keys = [name for name, _ in reversed(self.axes)]
        starts = [self.rank(dict(zip(keys, at, strict=True))) for at in product(*fixed)]
        steps = [self.rank(dict(zip(keys, at, strict=True))) for at in product(*free)]
        return [[start + step for step in steps] for start in starts]


REPLICAS = ("cp", "dp")
"""Axes along which ranks hold the same dense parameters but compute gradients from different tokens."""


def dense_mesh(layout: Layout, dp: int, cp: int = 1) -> Mesh:
    """Return the mesh of dense parameters."""
    return Mesh((("tp", layout.tp), ("cp", cp), ("dp", dp), ("pp", layout.pp)))


def expert_mesh(layout: Layout, dp: int, cp: int = 1) -> Mesh:
    """Return the mesh of experts' parameters."""
    here, parts = layout.tp * cp * dp, layout.etp * layout.ep
    assert not here % parts, "sizes.py refuses what doesn't fit"
    return Mesh((("etp", layout.etp), ("ep", layout.ep), ("edp", here // parts), ("pp", layout.pp)))
