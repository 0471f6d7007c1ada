"""The limit of open files of a process, and the error of a process that has reached it.

A file that can't be opened for this reason is neither damaged nor changed. Mapped files count as well, because a map
keeps a descriptor.
"""

import errno
import resource
from pathlib import Path

from formats.errors import CheckpointError

_REACHED = (errno.EMFILE, errno.ENFILE)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Large layouts have more rank files than the usual soft limit, and blends more datasets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return


def is_limit(error: BaseException) -> bool:
    """True for the error of a process, or of a machine, that has too many open files."""
    return isinstance(error, OSError) and error.errno in _REACHED


def limit_reached(path: Path | str) -> CheckpointError:
    """The error for a file that can't be opened because of the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CheckpointError(
        f"{path}: can't be opened: too many open files, of which this process may have {soft:,}; raise the limit (ulimit -n), "
        "and run again",
        code="too-many-files",
    )
