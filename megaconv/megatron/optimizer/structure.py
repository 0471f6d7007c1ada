"""The structure of the optimizer in a rank file.

    mixed precision   {"optimizer": {"state": {id: {exp_avg, exp_avg_sq[, step]}}, "param_groups": [{..., "params": ids}]},
                       (SGD: {id: {momentum_buffer}})
                       "fp32_from_fp16_params": [[master, ...] per group][, "grad_scaler"]}
    fp32              {"state": ..., "param_groups": ...}
    distributed       {"optimizer": {"param_groups": [without ids]}}, the tensors in flat buffers in distrib_optim.pt
    several           a list of these: dense and experts, or the first chunk and the others

Source: megatron/core/optimizer of Megatron core 0.4 to 0.19.
"""

from collections.abc import Mapping
from typing import Any

from formats.tensor import number
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.param_groups import WITHOUT
from megaconv.model.training import ADAM, SGD


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a rank: one, or several chained ones."""
    if isinstance(optimizer, list):
        return optimizer
    if isinstance(optimizer, dict) and optimizer and all(isinstance(key, int) for key in optimizer):
        return [optimizer[key] for key in sorted(optimizer)]
    return [optimizer]


def kind_of(optimizer: Any, *, has_buffers: bool) -> str:
    """The kind of an optimizer by its structure, for people. Never raises."""
    first = next((part for part in parts(optimizer) if isinstance(part, dict) and part), {})
    if has_buffers or is_distributed(first):
        return "distributed"
    if "optimizer" in first and "fp32_from_fp16_params" in first:
        return "mixed precision"
    return "fp32" if "param_groups" in first and "state" in first else "of an unknown kind"


def step_of(optimizer: Any) -> int | None:
    """The number of updates according to the first groups and the first parameter; None if they give none.

    Never raises.
    """
    for part in parts(optimizer):
        try:
            inner = part.get("optimizer", part)
            given = [group["step"] for group in inner["param_groups"] if "step" in group]
            states = inner.get("state", {})
            if "common_step" in states:
                given.append(states["common_step"])
            first = next(iter(states.values()), None)
            if isinstance(first, dict) and "step" in first:
                given.append(first["step"])
            if given:
                return max(map(updates, given))
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
    return None


def updates(step: Any) -> int:
    """A step of any optimizer as an integer. Raises ValueError for a value that isn't a count."""
    count = number(step)
    if count != int(count) or count < 0:
        raise ValueError(f"a step of {count}")
    return int(count)


def grad_scaler(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The loss scale of one optimizer in a list, which is empty without one."""
    if "grad_scaler" not in part:
        return []
    return [{name: number(value) for name, value in part["grad_scaler"].items()}]


def other_optimizer(where: str, what: str) -> NotExpressible:
    """The error for state that is neither Adam's nor SGD's."""
    return NotExpressible(
        f"{where}: the optimizer's state is {what}; only Adam's ({', '.join(ADAM)}) and SGD's ({', '.join(SGD)}) are supported; {WITHOUT}"
    )


def is_distributed(part: Mapping[str, Any]) -> bool:
    """True for an optimizer without tensors: they are in flat buffers elsewhere."""
    inner = part.get("optimizer")
    return isinstance(inner, dict) and "param_groups" in inner and "state" not in inner


def groups_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of one optimizer, as they are stored."""
    inner = part.get("optimizer", part)
    groups: list[dict[str, Any]] = inner.get("param_groups", [])
    return groups
