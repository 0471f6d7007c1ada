"""Settings that no flag sets: learning rate and log interval of `finetune`, the sequence length for examples."""

from dataclasses import replace
from typing import Any

from megaconv.model.config import ModelConfig
from megaconv.planning.model_size import parameter_count
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
    world: int,
) -> Settings:
    """Return the settings with all defaults. say: receives a line for each of them. world: number of processes."""
    if finetune and settings.optimizer.lr is None:
        settings = _with_learning_rate(settings, config, objective, say)
    if finetune and "log_interval" not in settings.given:
        settings = _choose(settings, "logging", "log_interval", LOG_INTERVAL)
        say(f"--log-interval {LOG_INTERVAL}: steps between log lines")
    if data.longest and settings.training.seq_length is None:
        most = min(config.max_positions, LONGEST_UNASKED)
        needed = -(-data.longest // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
        length = min(needed, most)
        settings = _choose(settings, "training", "seq_length", length)
        say(f"--seq-length {length}: the longest example has {data.longest:,} tokens")
    chosen = {"global_batch_size", "rampup_batch_size", "step_batch_size_schedule"} & settings.given
    if settings.logging.guide and not chosen:
        settings = _with_batch(settings, data, say, world)
    return settings


LARGEST_BATCH = 32
LEAST_STEPS = 16
"""Steps of an epoch for which the batch becomes smaller."""


def _with_batch(settings: Settings, data: TrainingData, say: Say, world: int) -> Settings:
    """Choose a batch that every number of data-parallel ranks divides."""
    unit = settings.training.micro_batch_size * world
    length = settings.training.seq_length or LONGEST_UNASKED
    samples = data.tokens // length
    wanted = min(LARGEST_BATCH, samples // LEAST_STEPS) if data.tokens else LARGEST_BATCH
    batch = max(1, wanted // unit) * unit
    say(f"--global-batch-size {batch}: samples of a step")
    return _choose(settings, "training", "global_batch_size", batch)


SMALL_MODEL, LARGE_MODEL = 2e9, 20e9
"""In parameters: below and above, --guide chooses another learning rate."""


def _with_learning_rate(
    settings: Settings, config: ModelConfig, objective: Objective, say: Say
) -> Settings:
    if settings.lora.wanted:
        rate, trained = objective.adapter_learning_rate, f"for adapters{objective.data_words}"
    else:
        rate, trained = objective.learning_rate, f"to train all weights{objective.data_words}"
    if settings.logging.guide:
        rate *= _factor(config)
    say(f"--lr {rate:g}: a usual learning rate {trained}")
    return _choose(settings, "optimizer", "lr", rate)


def _factor(config: ModelConfig) -> float:
    """Return the factor on the learning rate for the model's size: smaller models take larger steps."""
    parameters = parameter_count(config)
    if parameters < SMALL_MODEL:
        return 2.0
    return 0.5 if parameters > LARGE_MODEL else 1.0


def _choose(settings: Settings, subject: str, name: str, value: object) -> Settings:
    changes: dict[str, Any] = {name: value}
    return replace(settings, **{subject: replace(getattr(settings, subject), **changes)})
