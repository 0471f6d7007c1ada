"""The first matrix of a sublayer, with the norm before the sublayer if the model has one."""

from megatron_lite.models.build_plan import Plan
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear


def input_matrix(
    plan: Plan, rows: int, *, bias: bool, normed: bool = False
) -> NormColumnLinear | ColumnLinear:
    """Return a column-sharded matrix from the hidden states, which are normed already if sublayers share a norm.

    rows: of this rank. normed: True if another norm comes right before the sublayer.
    """
    config = plan.config
    if normed or config.norm.place in ("after", "after_sum") or config.has("shared_norm"):
        return ColumnLinear(config.hidden, rows, plan.ranks, bias=bias)
    return NormColumnLinear(config.hidden, rows, plan.norm, plan.ranks, bias=bias, keep=plan.keep)
