"""Muon for the matrices of layers, with AdamW for all other parameters. See muon_update.py for the update."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaconv.model import training
from megatron_lite.optimizer.adamw import ADAMW
from megatron_lite.optimizer.algorithm import Algorithm, TensorGroups, Update
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import OptimizerOptions

if TYPE_CHECKING:
    from megatron_lite.optimizer.ranges import FlatRange


class Muon(Algorithm):
    """An optimizer that equalizes the singular values of the momentum of whole matrices."""

    state = training.SGD
    rest = ADAMW
    whole = True

    def takes(self, info: ParameterInfo) -> bool:
        """Return whether the parameter is a matrix of a layer.

        AdamW updates norms, the router, the gate of a shared expert, tables and the head.
        """
        is_of_layer = ".layers." in info.name and info.kind in (Kind.SHARDED, Kind.EXPERT)
        return is_of_layer and info.is_matrix and len(info.native.shape) == 2

    def recorded(self, options: OptimizerOptions) -> Mapping[str, Any]:
        own = {"momentum": options.muon.momentum, "nesterov": options.muon.nesterov}
        return {**ADAMW.recorded(options), **own}

    def update_of(
        self, ranges: Sequence["FlatRange"], options: OptimizerOptions, groups: TensorGroups
    ) -> Update:
        from megatron_lite.optimizer.muon_update import MuonUpdate

        return MuonUpdate(ranges, options.muon, groups)


MUON = Muon()
