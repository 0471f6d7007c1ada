"""Every error that a user can act on; the command line catches these and nothing else."""

from formats.errors import CheckpointError, CorruptCheckpoint, NotEnoughSpace, TargetExists, UnsafeContent

__all__ = [
    "Cancelled",
    "CheckpointError",
    "CorruptCheckpoint",
    "Interrupted",
    "LayoutError",
    "ModelsDiffer",
    "NotEnoughSpace",
    "NotExpressible",
    "TargetExists",
    "TensorMismatch",
    "UnknownFamily",
    "UnknownFormat",
    "UnsafeContent",
    "UsageError",
    "is_interruption",
]


class UsageError(CheckpointError):
    """Options that contradict each other or the input."""

    exit_status = 2


class LayoutError(CheckpointError):
    """A model that can't be cut over the ranks asked for."""

    exit_status = 2


class NotExpressible(CheckpointError):
    """The target's naming or configuration has no words for something that the source has."""

    exit_status = 2


class UnknownFormat(CheckpointError):
    """No loader recognises the input, or no loader or saver has the name asked for."""

    exit_status = 2


class UnknownFamily(CheckpointError):
    """A model architecture without a table."""

    exit_status = 3


class TensorMismatch(CheckpointError):
    """A tensor is missing, unknown, doubled, or has another shape or dtype than the model says."""

    exit_status = 3


class ModelsDiffer(CheckpointError):
    """Two checkpoints that were claimed to hold the same model do not."""

    exit_status = 4


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. No KeyboardInterrupt, which Typer would turn into a silent exit."""


def is_interruption(error: BaseException) -> bool:
    """Also where it came while a thread was taking a lock back, which the lock answers with an error of its own."""
    return isinstance(error, (Interrupted, KeyboardInterrupt)) or (
        isinstance(error, RuntimeError) and isinstance(error.__context__, Interrupted)
    )


class Cancelled(CheckpointError):
    """The other side of the stream ended first; its own error is the one to report."""
