"""Plans the optimizer of a distributed checkpoint: tensors with the model's shapes, which any layout can load.

torch_dist     fully_reshardable, the distributed optimizer's own form; or the form of other optimizers
zarr           the form of other optimizers
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaconv.errors import UsageError
from megaconv.megatron.optimizer.plan import OptimizerWriter
from megaconv.megatron.optimizer.training_output import OutputTraining
from megaconv.model.ir import WEIGHT
from megaconv.model.natives import NativeTensor
from megaconv.model.training import ADAM, MASTER
from megaconv.options import SaveOptions

_RESHARDABLE = "fully_reshardable"


@dataclass(frozen=True)
class OptimizerForm:
    """The form of the optimizer. writer None means that there is no optimizer."""

    writer: OptimizerWriter | None
    distributed: bool

    def tensors(self, native: NativeTensor) -> Iterator[tuple[str, str]]:
        """(prefix of the key, slot) of each optimizer tensor of a weight."""
        if self.writer is None or not self.writer.trains(native):
            return
        if self.distributed:  # it stores an fp32 weight a second time
            yield "optimizer.state.param.", MASTER if self.writer.has(native, MASTER) else WEIGHT
        elif self.writer.has(native, MASTER):
            yield "optimizer.state.fp32_param.", MASTER
        yield from ((f"optimizer.state.{slot}.", slot) for slot in self.writer.moments)

    def state(self) -> Any:
        """The entry `optimizer` of common.pt. Several optimizers are numbered."""
        if self.writer is None:
            return None
        found = [self._one(self.writer, experts) for experts in self.writer.optimizers()]
        return dict(enumerate(found)) if len(found) > 1 else found[0]

    def _one(self, writer: OptimizerWriter, experts: bool | None) -> dict[str, Any]:
        groups = {"param_groups": writer.groups(experts)}
        if self.distributed:
            return writer.wrapped(groups, {"param_state_sharding_type": _RESHARDABLE})
        inner = {"state": writer.counter("common_step"), **groups}
        return writer.wrapped(inner, {}) if writer.masters else inner

    def content(self) -> dict[str, Any]:
        """The optimizer's entries in content_metadata."""
        if self.writer is None:
            return {}
        kind = {
            "distrib_optim_sharding_type": _RESHARDABLE,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        return {"chained_optim_avoid_prefix": True} | (kind if self.distributed else {})


def choose_form(kept: OutputTraining, options: SaveOptions) -> OptimizerForm:
    """The form for an output. Raises UsageError for a form that its format doesn't have."""
    if options.ckpt_format == "zarr" and options.distributed_optimizer:
        raise UsageError(
            "--use-distributed-optimizer: zarr checkpoints are written in the form that runs without it load; leave it out"
        )
    writer = kept.writer
    can = options.ckpt_format != "zarr" and (writer is None or writer.moments == ADAM)
    return OptimizerForm(writer, can and options.distributed_optimizer is not False)
