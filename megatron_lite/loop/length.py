"""The steps of a run, and the number of samples that its datasets have.

Source: `update_train_iters` and `get_train_valid_test_num_samples` in training.py of Megatron-LM. The order of samples
depends on these numbers.
"""

from collections.abc import Iterator

from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.settings.batch_size import BatchSchedule
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes


def total_samples(settings: Settings, sizes: Sizes, progress: Progress = Progress()) -> int:  # noqa: B008  # frozen
    """Return the number of samples at the end of the run. Iterations stay iterations, also after a change of the batch size."""
    training = settings.training
    left = max(0, (training.train_iters or 0) - progress.iteration)
    return training.train_samples or progress.consumed_samples + left * sizes.batch.full


def remaining_steps(
    settings: Settings, sizes: Sizes, progress: Progress
) -> Iterator[tuple[int, int]]:
    """Yield (samples consumed before, batch size) of every remaining step.

    Samples at the end that fill no step are left out. But the last step of a schedule of batch sizes may pass the end.
    """
    consumed, total = progress.consumed_samples, total_samples(settings, sizes, progress)
    passes_end = isinstance(sizes.batch, BatchSchedule)
    while consumed < total:
        size = sizes.batch.at(consumed)
        if consumed + size > total and not passes_end:
            return
        yield consumed, size
        consumed += size


def evaluations(settings: Settings, steps: int) -> int:
    """Return the number of evaluations of a run with so many steps."""
    return steps // settings.training.eval_interval + 1


def sample_counts(settings: Settings, sizes: Sizes, progress: Progress) -> list[int]:
    """Return the least number of samples for training, evaluation and test."""
    each = settings.training.eval_iters * sizes.batch.full
    last = progress.consumed_samples
    steps = progress.iteration
    for consumed, size in remaining_steps(settings, sizes, progress):
        last = consumed + size
        steps += 1
    rounds = evaluations(settings, steps)
    # Earlier evaluations may have had another batch size.
    done = progress.iteration // settings.training.eval_interval
    left = max(0, rounds - done)
    with_earlier = progress.consumed_valid_samples + each * left
    validation = max(each * rounds, with_earlier)
    train = max(last, total_samples(settings, sizes, progress))
    return [train, validation, each]


def check_length(settings: Settings, sizes: Sizes) -> None:
    """Raise UsageError for a run of no step."""
    given, first = settings.training.train_samples, sizes.batch.at(0)
    if given is not None and next(remaining_steps(settings, sizes, Progress()), None) is None:
        raise UsageError(
            f"--train-samples {given} are fewer than the {first} sequences of a step (--global-batch-size)"
        )


def samples_left_out(settings: Settings, sizes: Sizes, progress: Progress) -> int:
    """Return the number of samples at the end of --train-samples that fill no step."""
    last = progress.consumed_samples
    for consumed, size in remaining_steps(settings, sizes, progress):
        last = consumed + size
    return max(0, total_samples(settings, sizes, progress) - last)
