"""Output for people: each message is one line, whatever characters the names of files and tensors contain.

A name may contain line breaks, escape sequences that rewrite a terminal, characters that change the direction of
writing, or bytes that aren't text.
"""

import logging
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TextIO

from formats.partial_files import displayed

LONGEST = 4000
"""The longest line in characters. A longer line is truncated, with a note of how many characters are missing."""


def one_line(text: object, encoding: str | None = None) -> str:
    """Text in which every character is visible; others are escaped as in Python (`\\n`, `\\x1b`, `\\u202e`, `\\udcff`).

    encoding: characters outside this encoding are escaped too; None: only invisible ones are.
    """
    line = displayed(str(text))
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ... ({len(line) - LONGEST:,} more characters)"
    if not line.isprintable():
        line = "".join(map(_printable, line))
    return line if encoding is None else line.encode(encoding, "backslashreplace").decode(encoding)


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def show(text: object, file: TextIO | None = None) -> None:
    """Print one line. file: sys.stdout by default. An OSError names the stream."""
    file = file or sys.stdout
    put(one_line(text, file.encoding), file)


def put(text: str, file: TextIO) -> None:
    """Print text as it is. An OSError names the stream."""
    try:
        print(text, file=file)
    except OSError as error:
        error.filename = str(file.name).strip("<>")
        raise


def is_of_stream(error: OSError) -> bool:
    """True for an error of a stream, named by `put` or not, and False for one of a file."""
    return error.filename in (None, "stdout", "stderr")


def in_words(error: OSError) -> str:
    """An error of the system as a message: `DIR/file: Read-only file system`."""
    if error.filename is None:
        nowhere = "the working directory was removed; change to another one"
        return nowhere if _is_nowhere(error) else str(error)
    place = error.filename.decode() if isinstance(error.filename, bytes) else error.filename
    return f"{place}: {error.strerror}"


def _is_nowhere(error: OSError) -> bool:
    """True for the error of a process whose working directory was removed."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def reason_of(error: OSError | UnicodeDecodeError) -> str:
    """Why a file can't be read, for a message that names the file already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def open_closed_streams() -> None:
    """Open the standard streams that are closed (`<&-` in a shell), on the null device.

    Without this, the next opened file would get the number of a closed stream, and everything that a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def hide_download_bars(*, quiet: bool = False) -> None:
    """Hide the progress bars of the Hub's client if stderr isn't a terminal, or if `quiet` is set.

    The client reads the environment variable at import. A variable that is already set is kept.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        # In a log, a bar becomes endless lines.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def columns() -> int | None:
    """The width of the terminal of stdout; None if stdout isn't a terminal, so that lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_blocks() -> bool:
    """True if stdout can show block characters."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def folded(line: str, width: int | None, indent: int | None = None) -> list[str]:
    """A line, wrapped between words to fit a terminal.

    indent: spaces before all lines but the first; None: 4 more than the line's own indentation.
    """
    if width is None or len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip()) + 4 if indent is None else indent
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def log_to_stderr(name: str) -> None:
    """Write warnings to stderr, as lines that begin with this name. Each message is written once.

    Call it before the import of the Hub's client. The client would write its warnings a second time, in a form of its own.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"{name}: %(level)s: %(message)s"))
    handler.addFilter(_Once())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        return one_line(super().format(record))


class _Once(logging.Filter):
    """Passes each message once. Files are opened several times, and all ranks report the same."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = message in self._shown
        self._shown.add(message)
        return not shown
