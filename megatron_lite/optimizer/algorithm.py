"""The interface of an optimizer: the parameters that it updates, the state that it keeps, and its update.

A further optimizer needs a subclass of Algorithm in a separate file, its line in algorithms.py, and a value of
--optimizer (megatron_lite/settings/optimizers.py). Everything else asks the subclass: buckets, sharding, checkpoints,
and `plan`. This module and the subclasses import torch only to build an update, because `plan` works without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from formats.tensor import ITEMSIZE
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import OptimizerOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_lite.optimizer.ranges import FlatRange


BLOCK = 1 << 24
"""Elements whose state and gradients of fewer bits exist in float32 at a time."""


class Rates(NamedTuple):
    """The learning rates and the weight decay of one step."""

    lr: float
    weight_decay: float = 0.0
    decoupled_lr: float | None = None
    """The learning rate of embedding and head; None: they use lr."""

    def lr_of(self, *, decoupled: bool) -> float:
        """Return the learning rate of a parameter. decoupled: ParameterInfo.decoupled."""
        return self.decoupled_lr if decoupled and self.decoupled_lr is not None else self.lr

    def decay_of(self, *, decays: bool) -> float:
        """Return the weight decay of a parameter. decays: ParameterInfo.decays."""
        return self.weight_decay if decays else 0.0


class TensorGroups(NamedTuple):
    """The tensor ranks that have parts of the same matrix; None for a group of one rank."""

    dense: "ProcessGroup | None" = None
    experts: "ProcessGroup | None" = None

    def of(self, info: ParameterInfo) -> "ProcessGroup | None":
        """Return the ranks with the other parts of a parameter."""
        return self.experts if info.kind is Kind.EXPERT else self.dense


class Update(Protocol):
    """Updates the ranges of this rank for which it was made."""

    def step(self, rates: Rates, factor: float) -> None:
        """Update the masters in place with their gradients times factor."""

    def continue_after(self, steps: int) -> None:
        """Set the number of earlier steps, for an update that depends on it."""


class Algorithm(ABC):
    """One optimizer. An instance holds no state; state belongs to the ranges."""

    state: ClassVar[tuple[str, ...]]
    """The names of its tensors, one value for each updated element: float32, or as OptimizerOptions.state_dtype says.

    They have to be those of Adam or SGD in megaconv.model.training, because megaconv reads no others.
    """
    rest: ClassVar["Algorithm | None"] = None
    """The algorithm for the parameters that this one does not take; None if it takes all."""
    whole: ClassVar[bool] = False
    """True if it can't update a part of a parameter. A distributed optimizer then assigns each parameter to one rank."""
    widens: ClassVar[bool] = False
    """True if it may keep state and gradients in fewer bits, and updates blocks of them in float32 (narrow_update.py)."""
    distributed_form: ClassVar[bool] = False
    """True if `torch_dist` checkpoints store it in the form of Megatron's distributed optimizer, which is only for Adam."""

    def takes(self, info: ParameterInfo) -> bool:
        """Return whether it updates a parameter. It updates all parameters if there is no `rest`."""
        return True

    @abstractmethod
    def recorded(self, options: OptimizerOptions) -> Mapping[str, Any]:
        """Return its settings as Megatron records them in each parameter group of a checkpoint."""

    @abstractmethod
    def update_of(
        self, ranges: Sequence["FlatRange"], options: OptimizerOptions, groups: TensorGroups
    ) -> Update:
        """Return the update of these ranges, of which there is at least one. Their state is zero or loaded later."""

    def of(self, info: ParameterInfo) -> "Algorithm":
        """Return the algorithm that updates a parameter: this one or its `rest`."""
        return self if self.rest is None or self.takes(info) else self.rest.of(info)

    def chain(self) -> list["Algorithm"]:
        """Return this algorithm and those for the rest."""
        return [self] if self.rest is None else [self, *self.rest.chain()]

    def keeps_whole(self, info: ParameterInfo) -> bool:
        """Return whether one rank has to update the whole parameter."""
        return self.of(info).whole


def state_bytes(chosen: Algorithm, options: OptimizerOptions) -> int:
    """Return the bytes of an algorithm's state for one element."""
    return sum(ITEMSIZE[options.state_dtype(name)] for name in chosen.state)


def widened_bytes(chosen: Algorithm, options: OptimizerOptions, elements: int) -> int:
    """Return the bytes of the float32 memory for a block of state and gradients of fewer bits. elements: that it updates."""
    if not chosen.widens:
        return 0
    kept_in = [*map(options.state_dtype, chosen.state), options.main_grads_dtype]
    widened = sum(dtype != "float32" for dtype in kept_in)
    return widened * min(BLOCK, elements) * ITEMSIZE["float32"]
