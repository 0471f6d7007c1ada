"""Megatron's own numbers of a run in a checkpoint of PyTorch or DeepSpeed.

torch's and DeepSpeed's schedulers store how often they were called, and keep the shape of the schedule in the run's own
configuration. Megatron stores the shape, counts samples, keeps the limits of the learning rate in each parameter group,
and has arguments. So outputs have one more entry for these, which PyTorch and DeepSpeed don't look at. It counts only if
the checkpoint is of the same iteration: a run that went on and kept the entry has outdated it.
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
    groups = training.optimizer.groups if training.optimizer is not None else ()
    return {
        "iteration": iteration_of(training),
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
        "floating_point_operations": training.floating_point_operations,
        "scheduler": scheduler,
        "param_groups": [_stored_group(group) for group in groups],
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
        optimizer=_with_groups(state.optimizer, stored.get("param_groups", ())),
        arguments={**state.arguments, **_arguments(stored.get("args", {}))},
    )


def _arguments(stored: object) -> dict[str, Any]:
    """The arguments of an entry. Earlier versions wrote none."""
    if not isinstance(stored, Mapping) or not all(isinstance(name, str) for name in stored):
        raise ValueError(f"arguments of {stored!r:.80}")
    return plain_arguments(stored)


def _stored_group(group: ParamGroup) -> dict[str, Any]:
    return {"wd_mult": group.wd_mult, "settings": dict(group.settings)}


def _with_groups(optimizer: OptimizerState | None, stored: object) -> OptimizerState | None:
    """The optimizer whose groups have the entry's further settings. Settings that a group has already stay."""
    if optimizer is None:
        return None
    if not isinstance(stored, Sequence) or not all(map(_is_group, stored)):
        raise ValueError(f"parameter groups of {stored!r:.80}")
    completed = tuple(_completed(group, stored) for group in optimizer.groups)
    return replace(optimizer, groups=completed)


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
