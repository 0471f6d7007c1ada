"""Settings that no flag sets: learning rate and log interval of `finetune`, the sequence length for examples."""

from dataclasses import replace
from typing import Any

from megaconv.model.config import ModelConfig
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.training_data import Say, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import LONGEST_UNASKED

LOG_INTERVAL = 10
SEQUENCE_MULTIPLE = 64
"""Sequence lengths chosen here are multiples of this, so that tensor ranks can share a sequence."""


def with_defaults(
    settings: Settings,
    config: ModelConfig,
    objective: Objective,
    data: TrainingData,
    say: Say,
    *,
    finetune: bool,
) -> Settings:
    """Return the settings with all defaults. say: receives a line for each of them."""
    if finetune and settings.optimizer.lr is None:
        settings = _with_learning_rate(settings, objective, say)
    if finetune and "log_interval" not in settings.given:
        settings = _choose(settings, "logging", "log_interval", LOG_INTERVAL)
        say(f"--log-interval {LOG_INTERVAL}: steps between log lines")
    if data.longest and settings.training.seq_length is None:
        most = min(config.max_positions, LONGEST_UNASKED)
        needed = -(-data.longest // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
        length = min(needed, most)
        settings = _choose(settings, "training", "seq_length", length)
        say(f"--seq-length {length}: the longest example has {data.longest:,} tokens")
    return settings


def _with_learning_rate(settings: Settings, objective: Objective, say: Say) -> Settings:
    if settings.lora.wanted:
        rate, trained = objective.adapter_learning_rate, f"for adapters{objective.data_words}"
    else:
        rate, trained = objective.learning_rate, f"to train all weights with{objective.data_words}"
    say(f"--lr {rate:g}: a usual learning rate {trained}")
    return _choose(settings, "optimizer", "lr", rate)


def _choose(settings: Settings, subject: str, name: str, value: object) -> Settings:
    changes: dict[str, Any] = {name: value}
    return replace(settings, **{subject: replace(getattr(settings, subject), **changes)})
