"""The entry point of `megatron-lite`. It imports little, so that Ctrl-C ends a command in one line from its start on."""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with its exit status: 0 done, 1 failed, 2 wrong usage, 3 an input is corrupt."""
    try:
        from megatron_lite.commands.command_line import run

        run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("megatron-lite: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
