"""The state of torch's Adam in a distributed checkpoint (DCP), as torch's get_optimizer_state_dict names it.

    optimizer.state.layers.0.ffn_norm.weight.exp_avg     a tensor for each parameter: exp_avg, exp_avg_sq, step
    optimizer.param_groups.layers.0.ffn_norm.weight.lr   an object for each setting of a parameter's group, if flattened
    optimizer.param_groups.0.lr, ….0.params              an object for each setting of a group, if not

The dictionary may lie in others (`app.optim.state.…`). torchtitan flattens. Source:
torch/distributed/checkpoint/state_dict.py of torch 2.13; torchtitan 0.3.0, components/optimizer/utils.py.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.tensor import LazyTensor, number, read_tensor
from formats.torch_dist import DistDirectory
from megaconv.model.training import ADAM

_OPTIMIZER = r"(?:.*?\.)?optim(?:izers?)?\."
_STATE = re.compile(rf"{_OPTIMIZER}state\.(.+)\.(\w+)")
_GROUPS = re.compile(rf"{_OPTIMIZER}param_groups\.(.+)\.(\w+)")
MOST_STEPS = 1 << 40
"""More steps than any run makes."""
_NAMES = "param_names"
"""The names of a group's parameters, which torch keeps in groups that were made of named parameters."""


@dataclass(frozen=True)
class StoredOptimizer:
    """The optimizer of a checkpoint, with the names of its parameters in the model."""

    slots: Mapping[str, Mapping[str, LazyTensor]]
    """`exp_avg`, `exp_avg_sq` -> tensors by parameter."""
    steps: frozenset[int]
    """The numbers of updates that its parameters have had."""
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int]
    further: Sequence[str]
    """Names of state besides Adam's."""


def read(directory: DistDirectory, name_of: Callable[[str], str]) -> StoredOptimizer | None:
    """The optimizer of a checkpoint; None if it has no complete state of Adam with its groups.

    name_of: the name in the model of a parameter in the optimizer. Raises CorruptCheckpoint for groups and parameters
    that contradict each other.
    """
    held: dict[str, dict[str, LazyTensor]] = {}
    tensors = directory.tensors()
    for key, tensor in tensors.items():
        found = _STATE.fullmatch(key)
        if found:
            held.setdefault(found[2], {})[name_of(found[1])] = tensor
    trained = held.get(ADAM[0], {}).keys()
    complete = [slot for slot in (*ADAM, "step") if held.get(slot, {}).keys() == trained]
    if not trained or len(complete) < 3:
        return None
    groups, group_of = _groups(directory, tensors, name_of)
    if not groups:
        return None
    _require_same(directory.path, trained, group_of)
    return StoredOptimizer(
        slots={slot: held[slot] for slot in ADAM},
        steps=frozenset(numbers(directory.path, held["step"])),
        groups=groups,
        group_of=group_of,
        further=sorted(held.keys() - {*ADAM, "step"}),
    )


def _groups(
    directory: DistDirectory, tensors: Mapping[str, LazyTensor], name_of: Callable[[str], str]
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """(the groups, index of each parameter's group)."""
    settings: dict[str, dict[str, Any]] = {}
    for key in (*directory.objects(), *tensors):
        found = _GROUPS.fullmatch(key)
        if found and found[2] != _NAMES:
            # A rate that a compiled step changes is a tensor of one element.
            value = number(tensors[key]) if key in tensors else directory.read_object(key)
            settings.setdefault(found[1], {})[found[2]] = value
    if all("params" in group for group in settings.values()):
        return _numbered(settings, name_of)
    return _flattened(settings, name_of)


def _numbered(
    settings: Mapping[str, dict[str, Any]], name_of: Callable[[str], str]
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """settings: number of a group -> its settings, with the names of its parameters."""
    groups: list[Mapping[str, Any]] = []
    group_of: dict[str, int] = {}
    for index in sorted(settings, key=int):
        group = settings[index]
        params = group.pop("params")
        # A list of one was unwrapped by the reader.
        for name in [params] if isinstance(params, str) else params:
            group_of[name_of(name)] = len(groups)
        groups.append(group)
    return groups, group_of


def _flattened(
    settings: Mapping[str, dict[str, Any]], name_of: Callable[[str], str]
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """settings: a parameter -> the settings of its group. Equal groups are one."""
    groups: list[Mapping[str, Any]] = []
    group_of: dict[str, int] = {}
    for name, group in settings.items():
        if group not in groups:
            groups.append(group)
        group_of[name_of(name)] = groups.index(group)
    return groups, group_of


def _require_same(path: Path, trained: Collection[str], grouped: Mapping[str, int]) -> None:
    for name in sorted(set(trained) ^ grouped.keys()):
        lacks = "is in no parameter group" if name in trained else "has no optimizer state"
        raise CorruptCheckpoint(
            f"{path}: {name} {lacks}; save the optimizer after a step, with all its groups"
        )


def numbers(path: Path, steps: Mapping[str, LazyTensor]) -> Iterable[int]:
    """The values of the steps. path: for messages. Raises CorruptCheckpoint."""
    for name, step in steps.items():
        if prod(step.shape) != 1 or step.dtype not in ("float32", "int64", "int32"):
            raise CorruptCheckpoint(
                f"{path}: the step of {name} is {list(step.shape)} {step.dtype}, expected one number"
            )
        value = float(read_tensor(step).view(step.dtype).flat[0])
        if not value.is_integer() or not 0 <= value <= MOST_STEPS:
            raise CorruptCheckpoint(
                f"{path}: the step of {name} is {value:g}, expected a number of updates"
            )
        yield int(value)
