"""Checks that need no torch. They refuse a mistake at once; to import torch takes seconds."""

import os
from dataclasses import replace

from megaconv.best_iteration import with_best
from megaconv.hub import require_input
from megatron_lite.settings.config import Settings

_INPUTS = (
    ("checkpointing", "load"),
    ("distilling", "teacher_load"),
    ("lora", "lora_load"),
    ("tasks", "pretrained_checkpoint"),
    ("retrieval", "bert_load"),
    ("data", "tokenizer_model"),
)
"""(part of the settings, field) of the models that a run may start from, and of its tokenizer."""


def with_best_iterations(settings: Settings) -> Settings:
    """Return the settings with the iteration in place of each `RUN/best`: a later run may have another best one.

    Raises CheckpointError.
    """
    for subject, name in _INPUTS:
        part = getattr(settings, subject)
        given = getattr(part, name)
        if given is not None:
            changed = replace(part, **{name: with_best(given)})
            settings = replace(settings, **{subject: changed})
    return settings


def check_load(settings: Settings) -> None:
    """Refuse a --load or --teacher-load that names nothing. Raises UsageError.

    A run that starts from something else may name what isn't there yet (checkpoint/restore.py): its own --save, or the
    first checkpoint of a task.
    """
    if settings.distilling.teacher_load is not None:
        require_input(settings.distilling.teacher_load)
    saving = settings.checkpointing
    starts_elsewhere = (
        saving.resume or settings.tasks.pretrained_checkpoint or settings.retrieval.bert_load
    )
    if saving.load is None or starts_elsewhere:
        return
    if saving.save is None or os.path.realpath(saving.load) != os.path.realpath(saving.save):
        require_input(saving.load)
