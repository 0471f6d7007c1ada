"""The command line: a file a command. Work is imported inside each command, so that --help answers at once."""

from importlib import import_module

from megaconv.commands.cli.app import app
from megaconv.commands.process import run as run_process

__all__ = ["app", "main"]

COMMANDS = ("convert", "merge", "push", "inspect", "plan", "fingerprint", "verify", "diff", "scan", "formats", "demo")
"""Modules here that add themselves to the application, in the order in which --help lists them."""

for _name in COMMANDS:
    import_module(f"{__name__}.{_name}")


def main() -> None:
    """The entry point."""
    run_process(lambda: app(standalone_mode=False))
