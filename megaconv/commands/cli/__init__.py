"""The command line, with one file per command.

A process imports the command that it runs, and a command imports its work when it runs. So both start at once.
"""

import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from typer.models import CommandInfo

from megaconv.commands.cli.app import app
from megaconv.commands.process import run as run_process

__all__ = ["app", "load", "main"]

COMMANDS = (
    "convert",
    "merge",
    "average",
    "delta",
    "apply",
    "push",
    "inspect",
    "plan",
    "fingerprint",
    "verify",
    "seal",
    "diff",
    "scan",
    "clean",
    "serve-hf",
    "formats",
    "new-family",
    "demo",
)
"""The commands, in the order of --help and of the documentation. Each is a module of this package that adds itself to
the application, with `_` for `-`."""


_APPLICATION = app


def load(names: Sequence[str] = COMMANDS) -> None:
    """Import the modules of these commands, which adds them to the application."""
    for name in names:
        import_module(f"{__name__}.{name.replace('-', '_')}")
    _APPLICATION.registered_commands.sort(key=lambda command: COMMANDS.index(_name(command)))
    for command in _APPLICATION.registered_commands:
        # click would truncate the first sentence at the end of the line.
        command.short_help = re.split(r"(?<=\.)\s", _callback(command).__doc__ or "")[0]


def _name(command: CommandInfo) -> str:
    module = _callback(command).__module__
    return module.rpartition(".")[2].replace("_", "-")


def _callback(command: CommandInfo) -> Callable[..., Any]:
    assert command.callback is not None
    return command.callback


def _asked(arguments: Sequence[str]) -> Sequence[str]:
    """Return the commands that these arguments need: one, or all for --help, completion and a misspelt command."""
    first = arguments[0] if arguments else ""
    return (first,) if first in COMMANDS else COMMANDS


def main() -> None:
    """The entry point."""
    load(_asked(sys.argv[1:]))
    run_process(lambda: app(standalone_mode=False))
