"""Checks that need no torch. They refuse a mistake at once; to import torch takes seconds."""

import os

from megaconv.hub import require_input
from megatron_lite.settings.config import Settings


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
