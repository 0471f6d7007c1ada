"""Evaluations that are compared with each other: --keep-best and --early-stopping-patience."""

import math
from dataclasses import replace

from formats import rank_files
from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.loop.run import Run
from megatron_lite.parallel.comm import Group
from megatron_lite.processes.node import once_a_node
from megatron_lite.settings.config import Settings, flags
from megatron_lite.settings.sizes import Sizes


def compares(settings: Settings) -> bool:
    """Return whether the run compares its evaluations with each other."""
    patience = settings.training.early_stopping_patience
    return settings.checkpointing.keep_best or patience is not None


def require_evaluations(settings: Settings, dataset: Dataset | None, steps: int) -> None:
    """Raise UsageError for a flag that compares evaluations, if there are none. dataset: for evaluation. steps: of the run."""
    asked = {
        "--keep-best": settings.checkpointing.keep_best,
        "--early-stopping-patience": settings.training.early_stopping_patience,
    }
    has_any = dataset is not None and settings.training.eval_iters
    interval = settings.training.eval_interval
    for flag in (flag for flag, value in asked.items() if value):
        if not has_any:
            raise UsageError(
                f"{flag} compares evaluations, and there are none: give their data (--valid-finetune-data, --valid-data-path or "
                "--split), and --eval-iters above 0"
            )
        if interval > steps:
            raise UsageError(
                f"{flag} compares evaluations, and there are none: --eval-interval {interval} is more than the "
                f"run's {counted(steps, 'step')}"
            )


def with_comparable_best(
    progress: Progress, settings: Settings, sizes: Sizes, saver: Saver | None, node: Group
) -> Progress:
    """Return the progress of a continued run without its best iteration, if new evaluations can't be compared with it.

    That is so if the validation loss was another one, or if --save doesn't hold the checkpoint. Collective.
    """
    best = progress.best_iteration
    if best is None or not compares(settings):
        return progress
    is_comparable = progress.best_by == _measured_by(settings, sizes)
    if is_comparable and saver is not None and settings.checkpointing.keep_best:
        is_comparable = once_a_node(lambda: saver.holds(best), node)
    if is_comparable:
        return progress
    return replace(
        progress, best_iteration=None, best_loss=None, best_by=None, evaluations_since_best=0
    )


def _measured_by(settings: Settings, sizes: Sizes) -> str:
    """Return a hash of what the validation loss depends on beside the weights: the objective, and the samples of an evaluation."""
    chosen: dict[str, object] = {
        name: getattr(getattr(settings, subject), name)
        for name, (subject, field) in flags().items()
        if field.metadata["samples"]
    }
    chosen["valid_finetune_data"] = settings.data.valid_finetune_data
    chosen["samples"] = settings.training.eval_iters * sizes.batch.full
    chosen["seq_length"] = sizes.seq
    return cache_key(**{name: repr(value) for name, value in chosen.items()})


def note_evaluation(run: Run, loss: float) -> None:
    """Note whether an evaluation has the lowest validation loss so far. All ranks have the same loss."""
    if not compares(run.settings):
        return
    progress = run.progress
    since = progress.evaluations_since_best + 1
    lowest = math.inf if progress.best_loss is None else progress.best_loss
    if loss < lowest:
        since = 0
        progress = replace(
            progress,
            best_iteration=progress.iteration,
            best_loss=loss,
            best_by=_measured_by(run.settings, run.sizes),
        )
    run.progress = replace(progress, evaluations_since_best=since)


def patience_is_over(run: Run) -> str | None:
    """Return the reason to end if the last evaluations had no lower loss, else None."""
    patience = run.settings.training.early_stopping_patience
    if patience is None or run.progress.evaluations_since_best < patience:
        return None
    return f"--early-stopping-patience {patience}"


def kept_best(run: Run) -> str | None:
    """Return the path of the checkpoint that --keep-best keeps; None if there is none."""
    saving = run.settings.checkpointing
    if not saving.keep_best or run.progress.best_iteration is None:
        return None
    return f"{saving.save}/{rank_files.iteration_directory(run.progress.best_iteration)}"


def say_best(run: Run) -> None:
    """Print the lowest validation loss, and the checkpoint that has it."""
    path, progress = kept_best(run), run.progress
    if path is not None:
        loss, step = progress.best_loss, progress.best_iteration
        run.say(f"lowest validation loss: {loss:.5f}, after step {step}, kept as {path}")
