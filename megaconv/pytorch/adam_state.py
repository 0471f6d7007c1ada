"""The state of torch's Adam as a conversion streams it: for Megatron's groups, and for torch's."""

from collections.abc import Mapping

from formats.tensor import Shape
from megaconv.megatron.arguments.zero_groups import megatron_groups, torch_groups
from megaconv.model.training import OptimizerState
from megaconv.pytorch.stored_optimizer import StoredOptimizer
from megaconv.pytorch.training_state import Parameters


def adam_state(
    stored: StoredOptimizer,
    parameters: Parameters,
    shapes: Mapping[str, Shape],
    *,
    takes_megatrons: bool,
) -> OptimizerState:
    """The state of an optimizer without its tensors. shapes: of the canonical tensors.

    takes_megatrons: True if Megatron may decay other parameters than the source did.
    """
    own = parameters.by_canonical(stored.groups, stored.group_of)
    made = megatron_groups(own, shapes, None, takes_megatrons=takes_megatrons)
    incomplete = _incomplete(stored)
    return OptimizerState(
        "torch's Adam",
        max(stored.steps),
        made.groups,
        made.group_of,
        unsupported=made.unsupported or incomplete,
        torch=torch_groups(own, stored.groups),
        incomplete=incomplete,
    )


def _incomplete(stored: StoredOptimizer) -> str | None:
    if stored.further:
        return f"the optimizer's state has {', '.join(stored.further)} besides the moments of Adam"
    if len(stored.steps) > 1:
        return f"the parameters were updated different numbers of times: {sorted(stored.steps)}"
    return None
