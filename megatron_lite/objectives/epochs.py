"""The length of a run in epochs, and how often and how long it evaluates."""

from collections.abc import Callable, Iterator
from typing import Any

from formats.wording import are, counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.objectives.training_data import Say
from megatron_lite.settings.config import Settings, Training
from megatron_lite.settings.sizes import Sizes

MOST_EVALUATION_STEPS = 100
SamplesOf = Callable[[int], int]
"""Number of epochs -> number of their samples."""


def training_length(
    settings: Settings, sizes: Sizes, samples_of: SamplesOf, progress: Progress
) -> dict[str, Any]:
    """Return the setting that follows from --epochs. samples_of: for training. Raises UsageError."""
    training = settings.training
    if training.epochs is None:
        return {}
    if len(sizes.batch.sizes()) > 1:
        raise UsageError(
            "--epochs with a batch size that grows: give the length of the run with --train-samples"
        )
    left = max(0, samples_of(training.epochs) - progress.consumed_samples)
    steps = -(-left // sizes.batch.full)
    return {"train_iters": progress.iteration + steps}


def require_same_batch(batch: int, progress: Progress) -> None:
    """Raise UsageError if a continued run on a task has another batch size, on which its epochs and their order depend."""
    if progress.consumed_samples == progress.iteration * batch:
        return
    earlier = progress.consumed_samples // progress.iteration
    raise UsageError(
        f"--global-batch-size {batch}: the continued run has batches of {earlier}, of which the order of a task's examples "
        f"follows; give --global-batch-size {earlier}"
    )


def epochs_shown(training: Training) -> Iterator[str]:
    """Yield a line with the steps of --epochs, if it was given."""
    epochs, steps = training.epochs, training.train_iters
    if epochs is not None and steps is not None:
        yield f"{counted(epochs, 'epoch')} {are(epochs)} {counted(steps, 'step')}"


def evaluations(
    settings: Settings, sizes: Sizes, samples_of: SamplesOf, valid: SamplesOf | None, say: Say
) -> dict[str, Any]:
    """Return the settings of evaluations that no flag sets. say: receives a line for each of them.

    samples_of: for training. valid: for evaluation; None without evaluation data.
    """
    training, batch = settings.training, sizes.batch.full
    found: dict[str, Any] = {}
    if valid is None:
        return found
    if "eval_iters" not in settings.given:
        drawn = valid(1)
        found["eval_iters"] = min(-(-drawn // batch), MOST_EVALUATION_STEPS)
        say(f"--eval-iters {found['eval_iters']}: of {drawn:,} samples for evaluation")
    if "eval_interval" not in settings.given:
        epoch = samples_of(1)
        found["eval_interval"] = max(1, min(-(-epoch // batch), training.eval_interval))
        say(f"--eval-interval {found['eval_interval']}: about once an epoch, or more often")
    return found
