"""What can be wrong with files. Every error carries the exit status that a command ends with."""


class CheckpointError(Exception):
    """Anything that a user can act on: the message names the file or tensor, what was expected, and what to do."""

    exit_status = 1


class CorruptCheckpoint(CheckpointError):
    """A file is missing, truncated, or says something that can't be true."""

    exit_status = 3


class UnsafeContent(CheckpointError):
    """A file asks for code to be run, or reaches outside its checkpoint."""

    exit_status = 6


class NotEnoughSpace(CheckpointError):
    """The disk can't hold the output."""

    exit_status = 5


class TargetExists(CheckpointError):
    """Something is already where the output should go."""

    exit_status = 2
