"""Saves of a run: the content of a checkpoint, and the check for free space before the first step."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from formats import rank_files
from formats.errors import NotEnoughSpace
from megatron_lite.checkpoint import amax
from megatron_lite.checkpoint.adapter_runs import adapter_snapshot
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.same_run import stated_objective
from megatron_lite.checkpoint.snapshot import Snapshot, dist_snapshot
from megatron_lite.checkpoint.state import Progress, common_state
from megatron_lite.loop.run import Run
from megatron_lite.processes.failure import all_or_none


def check_space(run: Run) -> None:
    """Raise NotEnoughSpace if the next checkpoint does not fit on the disk. Call it before the first step. Collective."""
    saver = run.saver
    if saver is None:
        return
    # The loaded state may still contain lazy tensors.
    now = replace(run.progress, engine=run.engine.state())
    snapshot = _take(run, now)
    size = torch.tensor(snapshot.size)
    if run.place.world > 1:
        dist.all_reduce(size, group=run.place.save_group)
    needed = int(size)
    # A save that was killed, or that filled the disk, has left files which the next save would replace.
    saver.remove_partial()
    all_or_none(lambda: None if run.place.rank else _require_space(saver.root, needed))


def _require_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise NotEnoughSpace(
            f"--save {root}: a checkpoint takes {needed:,} bytes, and {free:,} are free; make room, choose another "
            "directory, or leave the optimizer's state out (--no-save-optim)"
        )


def save(run: Run) -> None:
    """Save a checkpoint unless this iteration is saved already."""
    iteration = run.progress.iteration
    if run.saver is None:
        return
    saving = run.settings.checkpointing
    if saving.keep_best:
        # A save in the background still uses the former one.
        run.saver.finish()
        run.saver.best = run.progress.best_iteration
    if run.saved == iteration:
        run.saver.tidy(iteration)
        return
    begun = time.perf_counter()
    snapshot = _take(run, run.progress)
    run.saver.save(snapshot)
    run.saved = iteration
    where = str(saving.save)
    if run.engine.options.lora is not None:
        # The directory that peft and megaconv merge expect.
        where = f"{where}/{rank_files.iteration_directory(iteration)}"
    seconds = time.perf_counter() - begun
    ways = " (being written while training goes on)" if saving.async_save else ""
    run.say(f"step {iteration:>6} | saved to {where} in {seconds:.2f} s{ways}")
    run.meter.restart()


def _take(run: Run, progress: Progress) -> Snapshot:
    """Return the snapshot: of adapters if only these are trained, else of all weights."""
    saving = run.settings.checkpointing
    if run.engine.options.lora is None:
        return _snapshot(run, progress)
    return adapter_snapshot(
        run.engine,
        progress,
        str(saving.load),
        stated_objective(run.settings),
        run.base_samples,
        with_optimizer=not saving.no_save_optim,
    )


def _snapshot(run: Run, progress: Progress) -> Snapshot:
    """Return the snapshot of all weights."""
    saving, samples = run.settings.checkpointing, run.scheduled
    with_optimizer = not saving.no_save_optim
    largest = amax.histories(run.engine)
    if largest and progress.engine is not None:
        progress = replace(progress, engine={**progress.engine, amax.AMAX: largest})
    common = common_state(
        run.settings, run.config, run.sizes, run.dropouts, progress, run.schedule.state(samples), run.schedule.at(samples),
        with_optimizer=with_optimizer,
    )  # fmt: skip
    take = dist_snapshot if saving.ckpt_format == "torch_dist" else rank_snapshot
    return take(run.engine, common, with_optimizer=with_optimizer, impl=saving.transformer_impl)
