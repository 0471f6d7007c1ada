"""The groups of ranks that a rank's part of a model needs: of its context, and of other tokens in the same layers."""

from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.grid import Grid
from megatron_lite.settings.options import ModelOptions

SEE_OTHER_TOKENS = ("tp", "replicas")
"""The grid axes along which routers of one layer route different tokens. Tensor ranks route their part of the sequence."""


def context_group(grid: Grid, options: ModelOptions) -> ContextGroup | None:
    """Return the ranks that share a sequence; None if each rank has whole sequences."""
    group = grid.group("cp")
    if group is None:
        return None
    levels = None
    near = options.near
    near_group = grid.group("cp_near")
    far_group = grid.group("cp_far")
    if near_group is not None and far_group is not None:
        far_rank, near_rank = divmod(grid.cp_rank, near)
        over_heads = ContextGroup(near_group, near_rank, near, "a2a")
        over_blocks = ContextGroup(far_group, far_rank, grid.cp // near, "p2p")
        levels = over_heads, over_blocks
    return ContextGroup(group, grid.cp_rank, grid.cp, options.context, levels)


def groups_of_other_tokens(grid: Grid) -> list[comm.Group]:
    """Return the groups of ranks that route different tokens of one layer."""
    return [grid.group(axis) for axis in SEE_OTHER_TOKENS]


def raise_to_largest(values: Tensor, grid: Grid) -> None:
    """Raise values, in place, to the largest ones of the ranks that see other tokens of the same layers."""
    for group in groups_of_other_tokens(grid):
        comm.largest(values, group)
