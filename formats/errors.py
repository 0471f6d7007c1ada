"""Errors of files. Every error has the exit status of the command, and a code for scripts."""

from formats.partial_files import displayed


class CheckpointError(Exception):
    """An error that a user can act on. The message names the file or tensor, what was expected, and what to do."""

    exit_status = 1
    code = "failed"
    """The code by which a script distinguishes causes. It never changes. megaconv/errors.py lists all codes."""

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        """code: for a cause that a script would treat differently from other errors of this class."""
        super().__init__(displayed(message))  # a stand-in's path would tell a user nothing
        if code is not None:
            self.code = code


class CorruptCheckpoint(CheckpointError):
    """A file is missing, truncated, or contains an impossible value."""

    exit_status = 3
    code = "corrupt-checkpoint"


class UnsupportedInput(CheckpointError):
    """The input is of a known kind that can't be read: an adapter, a GGUF file, weights of another quantization."""

    exit_status = 3
    code = "unsupported-input"


class UnsafeContent(CheckpointError):
    """A file asks to run code, or reaches outside its checkpoint."""

    exit_status = 6
    code = "unsafe-content"


class NotEnoughSpace(CheckpointError):
    """The disk can't hold the output."""

    exit_status = 5
    code = "not-enough-space"


class TargetExists(CheckpointError):
    """Something already exists at the path of the output."""

    exit_status = 2
    code = "target-exists"
