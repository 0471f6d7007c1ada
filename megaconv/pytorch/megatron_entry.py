"""Megatron's own numbers of a run in a checkpoint of PyTorch or DeepSpeed.

torch's and DeepSpeed's schedulers store how often they were called, and keep the shape of the schedule in the run's own
configuration. Megatron stores the shape, counts samples, keeps the limits of the learning rate in each parameter group,
fp16's loss scale, and arguments. So outputs have one more entry for these, which PyTorch and DeepSpeed don't look at. It
counts only if the checkpoint is of the same iteration: a run that went on and kept the entry has outdated it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaconv.megatron.arguments.param_groups import is_plain_setting
from megaconv.megatron.arguments.run_arguments import plain_arguments
from megaconv.model.training import OptimizerState, ParamGroup, TrainingState
from megaconv.pytorch.progress import iteration_of

ENTRY = "megatron"
"""The key of the entry."""
_PLAIN = (type(None), bool, int, float, str)


def entry(training: TrainingState) -> dict[str, Any]:
    """Megatron's numbers, to be stored under ENTRY."""
    scheduler = {
        name: value
        for name, value in (training.scheduler or {}).items()
        if isinstance(value, _PLAIN)
    }
    optimizer = training.optimizer
    groups = optimizer.groups if optimizer is not None else ()
    scaler = optimizer.grad_scaler if optimizer is not None else None
    return {
        "iteration": iteration_of(training),
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
        "floating_point_operations": training.floating_point_operations,
        "scheduler": scheduler,
        "param_groups": [_stored_group(group) for group in groups],
        "grad_scaler": None if scaler is None else dict(scaler),
        "args": dict(training.arguments),
    }


def with_entry(state: TrainingState, stored: object) -> TrainingState:
    """The state completed with an entry of the same iteration; unchanged without one.

    Raises TypeError and ValueError for an entry of another form.
    """
    if not isinstance(stored, Mapping) or stored.get("iteration") != iteration_of(state):
        return state
    scheduler = dict(stored["scheduler"])
    if not all(isinstance(value, _PLAIN) for value in scheduler.values()):
        raise ValueError(f"a scheduler of {scheduler!r:.80}")
    return replace(
        state,
        consumed_train_samples=int(stored["consumed_train_samples"]),
        consumed_valid_samples=int(stored["consumed_valid_samples"]),
        floating_point_operations=float(stored["floating_point_operations"]),
        scheduler=scheduler or None,
        optimizer=_completed_optimizer(state.optimizer, stored),
        arguments={**state.arguments, **_arguments(stored.get("args", {}))},
    )


def _arguments(stored: object) -> dict[str, Any]:
    """The arguments of an entry. Earlier versions wrote none."""
    if not isinstance(stored, Mapping) or not all(isinstance(name, str) for name in stored):
        raise ValueError(f"arguments of {stored!r:.80}")
    return plain_arguments(stored)


def _stored_group(group: ParamGroup) -> dict[str, Any]:
    return {"wd_mult": group.wd_mult, "settings": dict(group.settings)}


def _completed_optimizer(
    optimizer: OptimizerState | None, stored: Mapping[str, Any]
) -> OptimizerState | None:
    """The optimizer with the entry's loss scale, and with further settings of groups. A group's own settings stay."""
    if optimizer is None:
        return None
    scaler, groups = stored.get("grad_scaler"), stored.get("param_groups", ())
    if scaler is not None and not _is_scaler(scaler):
        raise ValueError(f"a loss scale of {scaler!r:.80}")
    if not isinstance(groups, Sequence) or not all(map(_is_group, groups)):
        raise ValueError(f"parameter groups of {groups!r:.80}")
    completed = tuple(_completed(group, groups) for group in optimizer.groups)
    return replace(optimizer, groups=completed, grad_scaler=scaler)


def _is_scaler(stored: object) -> bool:
    return isinstance(stored, Mapping) and all(
        isinstance(name, str) and type(value) in (int, float) for name, value in stored.items()
    )


def _is_group(stored: object) -> bool:
    if not isinstance(stored, Mapping) or not isinstance(stored.get("settings"), Mapping):
        return False
    settings = stored["settings"]
    has_names = all(isinstance(name, str) for name in settings)
    return has_names and all(map(is_plain_setting, settings.values()))


def _completed(group: ParamGroup, stored: Sequence[Mapping[str, Any]]) -> ParamGroup:
    """The group with the settings that all groups of its kind share in the entry."""
    of_kind = [each["settings"] for each in stored if each.get("wd_mult") == group.wd_mult]
    shared = dict(of_kind[0]) if of_kind else {}
    for settings in of_kind:
        shared = {
            name: value
            for name, value in shared.items()
            if name in settings and settings[name] == value
        }
    return replace(group, settings={**shared, **group.settings})
