"""The end of a failed command: one line on stderr, an exit status, and with --json a document on stdout."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from megaconv.commands.wrong_usage import wrong_usage
from megaconv.errors import CODES, CheckpointError, Interrupted, is_interruption
from megaconv.terminal import in_words, show

GO_ON = "the same command continues from here (--resume)"
NOTHING_LEFT = "nothing was left behind; with --resume, a run keeps its finished work, and the same command continues"


@contextmanager
def errors_reported() -> Iterator[None]:
    """End the process for an error that a user can act on. Other errors are bugs and pass with their traceback."""
    try:
        yield
    except CheckpointError as error:
        say(f"megaconv: error: {error}")
        _end(error.code, str(error))
    except (Interrupted, RuntimeError) as error:
        if not is_interruption(error):
            raise
        # An earlier run may have kept its work, also if this one was interrupted at once.
        unknown = GO_ON if "--resume" in sys.argv[1:] else "nothing was left behind"
        hint = (str(error) if isinstance(error, Interrupted) else "") or unknown
        say(f"megaconv: interrupted; {hint}")
        _end("interrupted", f"interrupted; {hint}")
    except BrokenPipeError:  # nobody reads the output any more
        sys.exit(1)
    except OSError as error:
        say(f"megaconv: error: {in_words(error)}")
        _end("system-error", in_words(error))
    except Exception as error:
        usage: Any = error
        if not hasattr(usage, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            usage.show()
            sys.exit(usage.exit_code)
        # Typer's own error: an unknown option, or an invalid value.
        message = wrong_usage(usage)
        say(f"megaconv: error: {message}")
        _end("wrong-usage", message)


@contextmanager
def how_to_continue(*, resume: bool) -> Iterator[None]:
    """Add to an interruption how the command continues. A message about a complete output stays.

    resume: True if the run keeps its finished work.
    """
    try:
        yield
    except (Interrupted, RuntimeError) as error:
        if not is_interruption(error):
            raise
        complete = str(error) if isinstance(error, Interrupted) else ""
        raise Interrupted(complete or (GO_ON if resume else NOTHING_LEFT)) from None


def say(text: str) -> None:
    """Print a line on stderr, if anything still reads it."""
    with suppress(OSError):
        show(text, sys.stderr)
        sys.stderr.flush()


def _end(code: str, message: str) -> NoReturn:
    status = CODES[code].exit_status
    if "--json" in sys.argv[1:]:
        with suppress(OSError):  # a broken stdout may be the error that is reported
            print(
                json.dumps(
                    {"error": {"code": code, "message": message, "exit_status": status}}, indent=1
                )
            )
    sys.exit(status)
