"""The command line, with one file per command.

A command imports its work when it runs, so that --help answers at once.
"""

import re
from importlib import import_module

from megaconv.commands.cli.app import app
from megaconv.commands.process import run as run_process

__all__ = ["app", "main"]

COMMANDS = (
    "convert",
    "merge",
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
    "demo",
)
"""The commands, in the order of --help and of the documentation. Each is a module of this package that adds itself to
the application, with `_` for `-`."""

for _name in COMMANDS:
    import_module(f"{__name__}.{_name.replace('-', '_')}")

_modules = {
    command.callback.__module__.rpartition(".")[2].replace("_", "-"): command
    for command in app.registered_commands
    if command.callback
}
# The import of one module may have registered another first.
app.registered_commands[:] = [_modules[name] for name in COMMANDS]
for _command in app.registered_commands:
    # click would truncate the first sentence at the end of the line.
    _command.short_help = re.split(r"(?<=\.)\s", _command.callback.__doc__ or "")[0]


def main() -> None:
    """The entry point."""
    run_process(lambda: app(standalone_mode=False))
