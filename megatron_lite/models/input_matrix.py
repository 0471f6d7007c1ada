"""The first matrix of a sublayer, with the norm before the sublayer if the model has one."""

from megatron_lite.models.build_plan import Plan
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear


def input_matrix(plan: Plan, rows: int, *, bias: bool) -> NormColumnLinear | ColumnLinear:
    """Return a column-sharded matrix from the hidden states, which are normed already if sublayers share a norm.

    rows: of this rank.
    """
    hidden = plan.config.hidden
    norm = plan.config.norm
    if norm.place == "after" or norm.shared:
        return ColumnLinear(hidden, rows, plan.ranks, bias=bias)
    return NormColumnLinear(hidden, rows, plan.norm, plan.ranks, bias=bias, keep=plan.keep)
