"""AdamW by PyTorch's fused kernels."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megaconv.model import training
from megatron_lite.optimizer.algorithm import Algorithm, TensorGroups, Update
from megatron_lite.settings.options import OptimizerOptions

if TYPE_CHECKING:
    from megatron_lite.optimizer.ranges import FlatRange


class AdamW(Algorithm):
    """Adam with decoupled weight decay."""

    state = training.ADAM
    widens = True
    distributed_form = True

    def recorded(self, options: OptimizerOptions) -> Mapping[str, Any]:
        return {"bias_correction": True, "betas": options.betas, "eps": options.eps}

    def update_of(
        self, ranges: Sequence["FlatRange"], options: OptimizerOptions, groups: TensorGroups
    ) -> Update:
        import torch

        from megatron_lite.optimizer.narrow_update import NarrowUpdate
        from megatron_lite.optimizer.torch_update import TorchUpdate

        make = partial(torch.optim.AdamW, betas=options.betas, eps=options.eps, fused=True)

        def update(wide: Sequence["FlatRange"]) -> Update:
            return TorchUpdate(make, wide, self.state, counts_steps=True)

        kept_in = {options.state_dtype(name) for name in self.state} | {options.main_grads_dtype}
        return (
            update(ranges) if kept_in == {"float32"} else NarrowUpdate(update, ranges, self.state)
        )


ADAMW = AdamW()
