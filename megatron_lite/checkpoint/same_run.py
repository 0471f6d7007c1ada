"""Checks that a run continues one of its own kind: the same model and objective, and adapters only if it trains adapters.

`finetune MODEL DATA` resumes without being asked to, and names its model and objective each time. They are checked.
Adapters belong to their base. For runs that train them, the start is checked in any case.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.adapters.peft_files import CONFIG
from megaconv.errors import UsageError
from megatron_lite.settings.config import Settings
from megatron_lite.settings.contradictions import flag_name

STATE = "trainer_state.json"
"""The file with the progress of a run that trains adapters."""
_REMEDY = "choose another directory for --save, or pass what that run was given"


def stated_objective(settings: Settings) -> dict[str, Any]:
    """Return the settings that choose the objective, by name. The arguments of a run have the same names."""
    return {
        "dpo": settings.dpo.dpo,
        "kto": settings.kto.kto,
        "reward_modeling": settings.rewards.reward_modeling,
        "embedding": settings.embeddings.embedding,
        "grpo": settings.grpo.grpo,
        "teacher_load": settings.distilling.teacher_load,
        "distill_on_policy": settings.distilling.distill_on_policy,
    }


def check_same_run(settings: Settings, saved: str, before: Mapping[str, Any]) -> None:
    """Check MODEL and the objective. before: the arguments of the run in `saved`. Raises UsageError."""
    if not settings.logging.guide:
        return
    if "load" in before:
        check_same_start(settings, saved, before["load"])
    check_same_objective(settings, saved, before)


def check_same_objective(settings: Settings, saved: str, before: Mapping[str, Any]) -> None:
    """Check the objective and the teacher, if `finetune MODEL DATA` resumes. before: see check_same_run. Raises UsageError."""
    if not settings.logging.guide:
        return
    stated = stated_objective(settings)
    for name in (name for name in stated if name in before):
        value = bool(stated[name])
        if bool(before[name]) != value:
            trained = "without" if value else "with"
            raise UsageError(f"--save {saved}: holds a run {trained} {flag_name(name)}; {_REMEDY}")
    teacher, earlier = stated["teacher_load"], before.get("teacher_load")
    if teacher and earlier and _last_name(teacher) != _last_name(earlier):
        raise UsageError(
            f"--save {saved}: holds a run with the teacher {earlier}, not {teacher}; {_REMEDY}"
        )


def check_same_start(settings: Settings, saved: str, before: str | None) -> None:
    """Check the start, MODEL or --load. before: that of the run in `saved`, None for random weights. Raises UsageError."""
    load = settings.checkpointing.load
    if _last_name(before) != _last_name(load):
        begin = "random weights" if before is None else before
        raise UsageError(
            f"--save {saved}: holds a run that started from {begin}, not from {load}; {_REMEDY}"
        )


def _last_name(place: str | None) -> str:
    """The last part of a path or Hub id. It stays if the directory is moved, or spelled in another way."""
    return "" if place is None else Path(place).name


def refuse_adapters(saved: str, root: Path) -> None:
    """Raise UsageError if the run under `root` trains adapters, for a run that trains all weights.

    saved: the place as --save spells it.
    """
    version = rank_files.find_version(root)
    if version is None or not (version / STATE).is_file():
        return
    rank = read_json(version / CONFIG, CONFIG_BYTES).get("r")
    raise UsageError(
        f"--save {saved}: holds a run that trains adapters; pass --lora-rank {rank} to continue it, or choose another directory"
    )
