"""The iteration of an output: the source's iteration, or a `release` checkpoint, which is the starting point of a run.

Megatron refuses iteration 0. It loads a release as the weights of a new run at iteration 0, without optimizer,
scheduler and RNG states. Source: load_checkpoint() in megatron/training/checkpointing.py, core 0.9 to 0.19.
"""

from dataclasses import replace

from megaconv.errors import UsageError
from megaconv.model.ceilings import ITERATION
from megaconv.model.ir import Header
from megaconv.model.training import TrainingState
from megaconv.options import SaveOptions

_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def check_iteration(options: SaveOptions) -> None:
    """Raises UsageError for an invalid --iteration, or for --iteration together with --release."""
    if options.iteration is None:
        return
    if not 1 <= options.iteration <= ITERATION:
        raise UsageError(f"--iteration {options.iteration}: should be from 1 to {ITERATION:,}")
    if options.release:
        raise UsageError(
            f"--release and --iteration {options.iteration} contradict each other; leave one of them out"
        )


def at_iteration(header: Header, options: SaveOptions, *, without_releases: bool = False) -> Header:
    """The header with the output's training state: `release`, or an iteration of at least 1.

    without_releases: True if readers of the output know only iterations. Raises UsageError if --iteration differs from
    the source's iteration.
    """
    return replace(
        header, training=_at_iteration(header, options, without_releases=without_releases)
    )


def _at_iteration(header: Header, options: SaveOptions, *, without_releases: bool) -> TrainingState:
    training = header.training
    begins = training.release or not training.iteration
    if options.iteration is not None:
        if not begins and options.iteration != training.iteration:
            raise UsageError(
                f"--iteration {options.iteration}: the source is iteration {training.iteration} of a run, which the output keeps; "
                "leave it out, or give --release"
            )
        return replace(training, iteration=options.iteration, release=False)
    if options.release:
        return training if training.release else _before_the_first_step(training)
    if not begins:
        return training
    if without_releases or (header.carries_optimizer and not training.release):
        return replace(training, iteration=training.iteration or 1, release=False)
    return replace(training, iteration=training.iteration or 0, release=True)


def _before_the_first_step(training: TrainingState) -> TrainingState:
    """The training state of a new run.

    Megatron takes over consumed samples even from a release, and would skip their data.
    """
    counts = dict.fromkeys((name for name in _COUNTED if name in training.arguments), 0)
    return replace(
        training,
        release=True,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        floating_point_operations=0,
        arguments={**training.arguments, **counts},
    )


def directory_iteration(training: TrainingState) -> int | None:
    """The iteration in the name of the output's directory; None for `release`."""
    return None if training.release else training.iteration
