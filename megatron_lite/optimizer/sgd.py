"""SGD with momentum by PyTorch's fused kernels."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megaconv.model import training
from megatron_lite.optimizer.algorithm import Algorithm, TensorGroups, Update
from megatron_lite.settings.options import OptimizerOptions

if TYPE_CHECKING:
    from megatron_lite.optimizer.ranges import FlatRange


class StochasticGradientDescent(Algorithm):
    """SGD with momentum. Weight decay is added to the gradient."""

    state = training.SGD

    def recorded(self, options: OptimizerOptions) -> Mapping[str, Any]:
        return {"momentum": options.momentum, "dampening": 0.0, "nesterov": False}

    def update_of(
        self, ranges: Sequence["FlatRange"], options: OptimizerOptions, groups: TensorGroups
    ) -> Update:
        import torch

        from megatron_lite.optimizer.torch_update import TorchUpdate

        make = partial(torch.optim.SGD, momentum=options.momentum, fused=True)
        return TorchUpdate(make, ranges, self.state, counts_steps=False)


SGD = StochasticGradientDescent()
