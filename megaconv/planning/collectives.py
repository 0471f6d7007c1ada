"""The bytes of collectives by group, and the number of times that a ring sends them."""

from collections.abc import Iterable
from dataclasses import dataclass

from megaconv.model.layout import Layout
from megaconv.planning.run import Run

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""The number of times that a ring algorithm sends each byte, before the factor (n - 1) / n for the rank's own part."""
FLOAT32, INT64, FLOAT64 = 4, 8, 8


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in a step."""

    group: str
    """A group of megatron_lite/parallel/grid.py.

    One of `tp`, `cp`, `cp_near`, `cp_far`, `replicas`, `ep`, `etp`, `edp`, `ends`, `stacks`, `world`. `pp` stands for messages
    between stages.
    """
    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, or `send`."""
    bytes: float
    """Bytes of whole tensors; a mean over data-parallel ranks if their parts are unequal."""
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return (
            self.bytes
            if self.kind == "send"
            else self.bytes * SENT[self.kind] * (self.ranks - 1) / self.ranks
        )


Counted = tuple[str, str, float]
"""(group, kind, bytes)."""


def summed(run: Run, counted: Iterable[Counted]) -> list[Traffic]:
    """Return one entry for each group and kind. Groups of one rank exchange nothing."""
    ranks = sizes(run)
    sums: dict[tuple[str, str], float] = {}
    for group, kind, count in counted:
        if ranks[group] > 1:
            sums[group, kind] = sums.get((group, kind), 0.0) + count
    return [Traffic(group, kind, total, ranks[group]) for (group, kind), total in sums.items()]


def sizes(run: Run) -> dict[str, int]:
    """Return the number of ranks of each group."""
    layout = run.layout
    return {
        "tp": layout.tp, "cp": run.cp, "cp_near": run.near, "cp_far": run.cp // run.near,
        "replicas": run.replicas,
        "pp": layout.pp, "ep": layout.ep, "etp": layout.etp, "edp": run.expert_dp,
        "ends": _holders_of_tables(layout), "stacks": 2 if layout.split_rank else 1, "world": run.world,
    }  # fmt: skip


def _holders_of_tables(layout: Layout) -> int:
    """Return the number of stages that hold the vocabulary's table: the first, T5's first of the decoder, and the last."""
    return len({0, layout.split_rank, layout.pp - 1})
