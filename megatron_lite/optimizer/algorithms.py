"""All optimizers by name."""

from megatron_lite.optimizer.adamw import ADAMW
from megatron_lite.optimizer.algorithm import Algorithm
from megatron_lite.optimizer.dealing import Dealer
from megatron_lite.optimizer.muon import MUON
from megatron_lite.optimizer.sgd import SGD
from megatron_lite.settings.options import OptimizerOptions

ALGORITHMS: dict[str, Algorithm] = {"adamw": ADAMW, "sgd": SGD, "muon": MUON}
"""OptimizerOptions.kind -> the optimizer."""


def algorithm(options: OptimizerOptions) -> Algorithm:
    """Return the optimizer that the options name."""
    return ALGORITHMS[options.kind]


def make_dealer(options: OptimizerOptions) -> Dealer:
    """Return a dealer for the parameters that the optimizer has to update as a whole. Without `distributed` it deals none."""
    return Dealer(algorithm(options).keeps_whole) if options.distributed else Dealer()
