"""The parameter groups of torch's Adam, for outputs that PyTorch or DeepSpeed continues from.

Megatron keeps in each group the learning rate and the weight decay that its scheduler has set for the next step, as
torch's schedulers do.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.model.ir import Header, is_trained
from megaconv.model.natives import NativeTensor
from megaconv.model.training import ADAM, MOMENTUM, OptimizerState, ParamGroup, TorchGroups

SETTINGS: Mapping[str, Any] = {
    "lr": 0.0,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}
"""The settings that decide what a step of torch's AdamW computes, with their defaults."""
IMPLEMENTATION: Mapping[str, Any] = {
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""The settings that decide how torch computes a step, with their defaults."""
WITHOUT = "--no-optimizer converts the weights alone"


def unfit(header: Header) -> str | None:
    """The reason why no torch optimizer can continue from the optimizer state of a source; None if one can."""
    optimizer = header.training.optimizer
    if optimizer is None or not header.carries_optimizer:
        return None
    if optimizer.incomplete:
        return optimizer.incomplete
    slots = {key.slot for key in header.manifest}
    if MOMENTUM in slots or not slots.issuperset(ADAM):
        return "the optimizer's state is that of SGD or Muon, the output's is Adam's"
    return None


def torch_groups(header: Header) -> TorchGroups:
    """The groups of a source that carries the state of Adam. Equal groups of Megatron's are one."""
    optimizer = header.training.optimizer or OptimizerState("none")
    if optimizer.torch is not None:
        return optimizer.torch
    highest = (header.training.scheduler or {}).get("max_lr")
    settings = [_of_megatron(group, highest) for group in optimizer.groups]
    distinct = [each for place, each in enumerate(settings) if settings.index(each) == place]
    group_of = {name: distinct.index(settings[index]) for name, index in optimizer.group_of.items()}
    used = sorted(set(group_of.values()))
    return TorchGroups(
        tuple(distinct[index] for index in used),
        {name: used.index(index) for name, index in group_of.items()},
    )


def _of_megatron(group: ParamGroup, highest: float | None) -> dict[str, Any]:
    """highest: the largest learning rate of the run's schedule, if it is known."""
    own = {name: group.settings[name] for name in SETTINGS if name in group.settings}
    made = {**SETTINGS, **own}
    largest = group.settings.get("max_lr") or highest
    made["betas"] = tuple(made["betas"])
    return made | ({"initial_lr": largest} if largest else {})


def group_of(native: NativeTensor, groups: TorchGroups, header: Header) -> int | None:
    """Index of a native tensor's group; None if it isn't trained. Raises NotExpressible if its parts differ in it."""
    found = {
        groups.group_of.get(name) if is_trained(name, header.manifest) else None
        for name in native.parts
    }
    if len(found) > 1:
        raise NotExpressible(
            f"{native.name}: would join tensors of different parameter groups; {WITHOUT}"
        )
    return found.pop()


def listed(groups: Iterable[Mapping[str, Any]], counts: Mapping[int, int]) -> str:
    """The groups for people. counts: index -> number of its tensors."""
    return ", ".join(
        f"{counts.get(index, 0)} tensors with weight decay {group.get('weight_decay', 0):g}"
        for index, group in enumerate(groups)
    )
