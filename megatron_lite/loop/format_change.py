"""Megatron-LM's --ckpt-convert-format F and --ckpt-convert-save D: load a run's checkpoint, save it below D/F, and end.

No step is made. The run's flags decide the layout, so the save has the shards of this run.
"""

import os
from dataclasses import replace
from pathlib import Path

from megaconv.errors import UsageError
from megatron_lite.loop.run import Run
from megatron_lite.loop.saving import save
from megatron_lite.settings.config import Checkpointing, Settings


def changes_format(settings: Settings) -> bool:
    """Return whether the run only saves its checkpoint in another format."""
    return settings.checkpointing.ckpt_convert_format is not None


def with_changed_format(settings: Settings) -> Settings:
    """Return settings that save in the other format and place; without these flags, the same settings.

    Raises UsageError.
    """
    saving = settings.checkpointing
    target = saving.ckpt_convert_save
    if saving.ckpt_convert_format is None and target is None:
        return settings
    if saving.ckpt_convert_format is None or target is None:
        raise UsageError("--ckpt-convert-format and --ckpt-convert-save belong together; give both")
    if settings.lora.wanted:
        raise UsageError("--ckpt-convert-format: adapters have one format; leave the flag out")
    _require_another_place(saving, target)
    changed = replace(
        saving,
        ckpt_format=saving.ckpt_convert_format,
        save=str(Path(target) / saving.ckpt_convert_format),
        resume=False,
        async_save=False,
    )
    return replace(settings, checkpointing=changed)


def _require_another_place(saving: Checkpointing, target: str) -> None:
    if saving.load is None:
        raise UsageError("--ckpt-convert-format needs --load with the checkpoint")
    places = {"--load": saving.load, "--save": saving.save}
    for flag, path in places.items():
        if path is not None and os.path.realpath(path) == os.path.realpath(target):
            raise UsageError(
                f"--ckpt-convert-save {target}: is the directory of {flag}; choose another"
            )


def save_in_format(run: Run) -> None:
    """Save the checkpoint that the run has loaded, and close the run. Collective."""
    run.progress = replace(run.progress, engine=run.engine.state())
    run.saved = None
    save(run)
    if run.saver is not None:
        run.saver.finish()
    run.engine.finish()
    for sink in run.sinks:
        sink.close()
