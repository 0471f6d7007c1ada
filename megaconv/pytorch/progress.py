"""The progress of a run in a checkpoint of PyTorch or DeepSpeed: steps, the learning-rate schedule, samples.

torch's and DeepSpeed's schedulers store how often they were called, and keep the shape of the schedule in the run's own
configuration. `megatron_entry.py` keeps the numbers that Megatron has beyond these.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.model.training import TorchGroups, TrainingState

GLOBAL_BATCH_SIZE = "global_batch_size"
"""The --option for the samples of a step, which PyTorch's checkpoints don't count."""
COUNT_OPTIONS = {
    GLOBAL_BATCH_SIZE: "the samples of a step of the run, from which Megatron's count follows"
}
_log = logging.getLogger("megaconv")

_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
"""Settings that Megatron's scheduler stores and others don't. A run overrides them, or stops at once, since None differs
from its own settings."""


def iteration_of(training: TrainingState) -> int:
    """The number of steps that the run has made."""
    steps = training.optimizer.step if training.optimizer is not None else None
    return training.iteration or steps or 0


def lr_scheduler(training: TrainingState, groups: TorchGroups) -> dict[str, Any]:
    """The state of torch's LambdaLR after the steps of the run.

    A rate that the schedule multiplies (`base_lrs`) is left out if the source doesn't have it: a run that needs it then
    stops, instead of going on with a wrong one.
    """
    steps = iteration_of(training)
    rates = [float(group.get("lr", 0.0)) for group in groups.groups]
    stored = [group.get("initial_lr") for group in groups.groups]
    highest = [float(rate) for rate in stored if isinstance(rate, (int, float))]
    known = {"base_lrs": highest} if len(highest) == len(rates) else {}
    return {
        **known,
        "last_epoch": steps,
        "_step_count": steps + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(rates),
    }


def left_out(training: TrainingState) -> str:
    """A notice that names the parts of the training state that such an output can't hold."""
    parts = ["the position in the data", "random-number generators"]
    if training.optimizer is not None and training.optimizer.grad_scaler:
        parts.append("fp16's loss scale")
    parts.append("the shape of the learning-rate schedule, which the run's own configuration gives")
    return f"not carried over: {', '.join(parts)}"


def with_samples(state: TrainingState, samples: int) -> TrainingState:
    """The state of a run that counts its samples, and whose schedule is unknown."""
    scheduler = {**dict.fromkeys(_SCHEDULE), "num_steps": samples}
    return replace(state, consumed_train_samples=samples, scheduler=scheduler)


def with_counted_samples(state: TrainingState, batch_size: int | None, path: Path) -> TrainingState:
    """The state of a run that counts steps alone. batch_size: the samples of a step, if they are known."""
    if batch_size is None:
        _log.warning(
            "%s: counts no samples: for Megatron, give --option %s=N, the samples of a step",
            path,
            GLOBAL_BATCH_SIZE,
        )
    return with_samples(state, (state.iteration or 0) * (batch_size or 0))


def batch_size_of(extra: Mapping[str, str]) -> int | None:
    """The samples of a step that the user gives. Raises UsageError."""
    asked = extra.get(GLOBAL_BATCH_SIZE)
    if asked is None:
        return None
    if not asked.isdecimal() or int(asked) == 0:
        raise UsageError(f"--option {GLOBAL_BATCH_SIZE}={asked}: should be a number of samples")
    return int(asked)
