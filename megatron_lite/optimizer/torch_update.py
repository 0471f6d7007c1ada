"""Updates ranges by one of PyTorch's optimizers, whose state consists of the ranges' tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.optimizer.algorithm import Rates
from megatron_lite.optimizer.ranges import FlatRange

STEP = "step"
"""PyTorch's name for the number of updates, which Adam keeps for each parameter."""


class TorchUpdate:
    """Updates all ranges in one call."""

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        ranges: Sequence[FlatRange],
        state: Sequence[str],
        *,
        counts_steps: bool,
    ) -> None:
        """make: returns PyTorch's optimizer of the given parameter groups. state: its tensors, by PyTorch's names.

        counts_steps: whether its state has a number of steps too.
        """
        self._optimizer = make(_parameter_groups(ranges))
        self._device = ranges[0].master.device
        for item in ranges:
            item.master.grad = item.gradient
            of_range = {name: item.tensors[name] for name in state}
            if counts_steps:
                of_range[STEP] = torch.zeros((), device=self._device)
            self._optimizer.state[item.master] = of_range

    def step(self, rates: Rates, factor: float) -> None:
        """Update the masters. The kernel that reads the gradients multiplies them too, so the factor costs nothing."""
        for group in self._optimizer.param_groups:
            group["lr"] = rates.lr_of(decoupled=group["decoupled"])
            group["weight_decay"] = rates.decay_of(decays=group["decays"])
        # The fused kernels divide gradients by grad_scale.
        divisor = None if factor == 1.0 else torch.full((), 1 / factor, device=self._device)
        setattr(self._optimizer, "grad_scale", divisor)  # noqa: B010  # torch.amp sets the same attribute
        self._optimizer.step()

    def continue_after(self, steps: int) -> None:
        """Set the numbers of steps."""
        for of_range in self._optimizer.state.values():
            if STEP in of_range:
                of_range[STEP].fill_(steps)


def _parameter_groups(ranges: Sequence[FlatRange]) -> list[dict[str, Any]]:
    """Return one group for each combination of learning rate and weight decay."""
    masters: dict[tuple[bool, bool], list[Tensor]] = {}
    for item in ranges:
        masters.setdefault((item.info.decays, item.info.decoupled), []).append(item.master)
    return [
        {"params": of_group, "decays": decays, "decoupled": decoupled}
        for (decays, decoupled), of_group in masters.items()
    ]
