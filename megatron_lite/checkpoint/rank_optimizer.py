"""Builds the optimizer state of a rank file in Megatron's form: parameters by number, in the order of their groups."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megaconv.megatron.arguments.param_groups import Class, class_of, is_expert
from megaconv.model.training import EXP_AVG, MASTER
from megatron_lite.checkpoint.plain_values import plain
from megatron_lite.checkpoint.rank_file import SharedTensor

Name = tuple[int, str]
"""(chunk, name in the file)."""
Slots = Mapping[Name, Mapping[str, SharedTensor]]
"""Optimizer state by parameter and slot."""


def optimizers(
    groups: Mapping[str, Any],
    listed: list[Name],
    models: list[OrderedDict[str, SharedTensor]],
    slots: Slots,
    *,
    expert_groups: bool,
) -> Any:
    """Return one optimizer state, or with expert parallelism (expert_groups) a list of two: dense parameters, then experts.

    As in Megatron, a stage without experts has one.
    """
    dense, experts = (
        [key for key in listed if is_expert(key[1]) == of_experts] for of_experts in (False, True)
    )
    if not expert_groups or not experts:
        return _optimizer_state(groups, listed, models, slots)
    theirs = [
        {**group, "is_expert_parallel": True} for group in groups["optimizer"]["param_groups"]
    ]
    of_experts = {**groups, "optimizer": {**groups["optimizer"], "param_groups": theirs}}
    return [
        _optimizer_state(groups, dense, models, slots),
        _optimizer_state(of_experts, experts, models, slots),
    ]


def _optimizer_state(
    groups: Mapping[str, Any],
    listed: list[Name],
    models: list[OrderedDict[str, SharedTensor]],
    slots: Slots,
) -> dict[str, Any]:
    """Return the state of Megatron's Float16OptimizerWithFloat16Params, or of its FP32Optimizer, which has no masters.

    groups: the `optimizer` entry of common_state(). listed: the parameters in the order of the model.
    """
    used = _used_groups(groups["optimizer"]["param_groups"], listed, models)
    in_order = [key for group in used for key in group.members]
    numbers = {key: number for number, key in enumerate(in_order)}
    param_groups = []
    for group in used:
        members = [numbers[key] for key in group.members]
        param_groups.append({**group.settings, "params": members})
    step = plain(torch.tensor(float(param_groups[0]["step"])))
    state = {numbers[key]: _state_of(slots[key], step) for key in in_order}
    inner = {"state": state, "param_groups": param_groups}
    if all(MASTER not in slots[key] for key in in_order):
        return inner
    masters = []
    for group in used:
        with_master = [key for key in group.members if MASTER in slots[key]]
        masters.append([slots[key][MASTER].placeholder for key in with_master])
    return {**groups, "optimizer": inner, "fp32_from_fp16_params": masters}


class _Group(NamedTuple):
    """One of Megatron's parameter groups."""

    settings: Mapping[str, Any]
    members: list[Name]


def _used_groups(
    param_groups: list[dict[str, Any]],
    listed: list[Name],
    models: list[OrderedDict[str, SharedTensor]],
) -> list[_Group]:
    """Return the groups that have parameters."""
    by_class: dict[Class, _Group] = {}
    for settings in param_groups:
        its_class = Class(settings["wd_mult"] != 0, not settings["default_config"])
        by_class[its_class] = _Group(settings, [])
    decoupled = any(each.decoupled for each in by_class)
    for chunk, name in listed:
        shape = models[chunk][name].placeholder.shape
        its_class = class_of(name, shape, decoupled=decoupled)
        by_class[its_class].members.append((chunk, name))
    return [group for group in by_class.values() if group.members]


def _state_of(slots: Mapping[str, SharedTensor], step: Any) -> dict[str, Any]:
    """Return PyTorch's state of one parameter. Adam's state includes the number of steps."""
    found: dict[str, Any] = {
        slot: tensor.placeholder for slot, tensor in slots.items() if slot != MASTER
    }
    if EXP_AVG in slots:
        found["step"] = step
    return found
