"""The values of --optimizer: the algorithm that each selects, and the runs that it can't train."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One value of --optimizer."""

    kind: str
    """The algorithm, as in OptimizerOptions.kind."""
    distributed: bool = False
    """True if it shards optimizer state without --use-distributed-optimizer."""
    trains_adapters: bool = True
    trains_fp16: bool = True
    narrow_moments: bool = False
    """True if its moments may be kept in bf16."""


OPTIMIZERS = {
    "adam": Choice("adamw", narrow_moments=True),
    "sgd": Choice("sgd"),
    "muon": Choice("muon", trains_adapters=False, trains_fp16=False),
    "dist_muon": Choice("muon", distributed=True, trains_adapters=False, trains_fp16=False),
}
