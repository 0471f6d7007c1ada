"""Ranks counted along named axes, as pure arithmetic: whose neighbour is who along which of them.

    dense parameters    rank = tp + TP * (cp + CP * (dp + DP * pp))
    experts             rank = etp + ETP * (ep + EP * (edp + EDP * pp)), the same ranks of a stage, shared out otherwise

Megatron's order (megatron/core/parallel_state.py): tensor ranks are neighbours, stages are furthest apart.
"""

from dataclasses import dataclass
from itertools import product

from megaconv.model.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Axes by name with their sizes, the fastest first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        total = 1
        for _, count in self.axes:
            total *= count
        return total

    def place(self, rank: int) -> dict[str, int]:
        """By axis."""
        found = {}
        for name, count in self.axes:
            rank, found[name] = divmod(rank, count)
        return found

    def rank(self, place: dict[str, int]) -> int:
        found = 0
        for name, count in reversed(self.axes):
            found = found * count + place[name]
        return found

    def groups(self, *names: str) -> list[list[int]]:
        """All ranks, in groups that differ along these axes alone; the first axis of the mesh is fastest in a group too."""
        fixed = [range(1) if name in names else range(count) for name, count in reversed(self.axes)]
        free = [range(count) if name in names else range(1) for name, count in reversed(self.axes)]
        keys = [name for name, _ in reversed(self.axes)]
        starts = [self.rank(dict(zip(keys, at, strict=True))) for at in product(*fixed)]
        steps = [self.rank(dict(zip(keys, at, strict=True))) for at in product(*free)]
        return [[start + step for step in steps] for start in starts]


REPLICAS = ("cp", "dp")
"""Axes along which ranks have the same dense parameters, and gradients from other tokens."""


def dense_mesh(layout: Layout, dp: int, cp: int = 1) -> Mesh:
    return Mesh((("tp", layout.tp), ("cp", cp), ("dp", dp), ("pp", layout.pp)))


def expert_mesh(layout: Layout, dp: int, cp: int = 1) -> Mesh:
    here, parts = layout.tp * cp * dp, layout.etp * layout.ep
    assert not here % parts, "sizes.py refuses what doesn't fit"
    return Mesh((("etp", layout.etp), ("ep", layout.ep), ("edp", here // parts), ("pp", layout.pp)))
