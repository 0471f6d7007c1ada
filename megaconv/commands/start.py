"""The entry point of the command line. Ctrl-C ends it in one line, also while its modules are imported."""

import signal


def main() -> None:
    """Import the command line and run it. It handles signals itself once a command runs."""
    try:
        from megaconv.commands.cli import main as run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the message must appear
        from megaconv.commands.endings import errors_reported
        from megaconv.errors import Interrupted

        with errors_reported():
            raise Interrupted from None
