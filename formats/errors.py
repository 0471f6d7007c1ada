"""What can be wrong with files. Every error carries the exit status that a command ends with, and a code for scripts."""


class CheckpointError(Exception):
    """Anything that a user can act on: the message names the file or tensor, what was expected, and what to do."""

    exit_status = 1
    code = "failed"
    """By which a script distinguishes causes; never changes. All are listed in megaconv/errors.py."""

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        """code: of a cause that a script would treat differently from what else this class is raised for."""
        super().__init__(message)
        if code is not None:
            self.code = code


class CorruptCheckpoint(CheckpointError):
    """A file is missing, truncated, or says something that can't be true."""

    exit_status = 3
    code = "corrupt-checkpoint"


class UnsupportedInput(CheckpointError):
    """The input is of a known kind that can't be read: an adapter, a GGUF file, weights of another quantization."""

    exit_status = 3
    code = "unsupported-input"


class UnsafeContent(CheckpointError):
    """A file asks for code to be run, or reaches outside its checkpoint."""

    exit_status = 6
    code = "unsafe-content"


class NotEnoughSpace(CheckpointError):
    """The disk can't hold the output."""

    exit_status = 5
    code = "not-enough-space"


class TargetExists(CheckpointError):
    """Something is already where the output should go."""

    exit_status = 2
    code = "target-exists"
