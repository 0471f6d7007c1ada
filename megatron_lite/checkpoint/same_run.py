"""Checks that `finetune MODEL DATA` continues its own run, because this form resumes without being asked to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.settings.config import Settings

_REMEDY = "choose another directory for --save, or pass what that run was given"


def check_same_run(settings: Settings, saved: str, before: Mapping[str, Any]) -> None:
    """Check MODEL and the objective. before: the arguments of the run in `saved`. Raises UsageError."""
    if not settings.logging.guide:
        return
    if "load" in before:
        check_same_start(settings, saved, before["load"])
    for name, value in (("dpo", settings.dpo.dpo), ("grpo", settings.grpo.grpo)):
        if name in before and bool(before[name]) != value:
            trained = "without" if value else "with"
            raise UsageError(f"--save {saved}: holds a run {trained} --{name}; {_REMEDY}")


def check_same_start(settings: Settings, saved: str, before: str | None) -> None:
    """Check MODEL. before: the start of the run in `saved`, None for random weights. Raises UsageError."""
    load = settings.checkpointing.load
    if settings.logging.guide and _last_name(before) != _last_name(load):
        begin = "random weights" if before is None else before
        raise UsageError(
            f"--save {saved}: holds a run that started from {begin}, not from {load}; {_REMEDY}"
        )


def _last_name(place: str | None) -> str:
    """The last part of a path or Hub id. It stays if the directory is moved, or spelled in another way."""
    return "" if place is None else Path(place).name
