"""`megaconv formats`."""

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.terminal import show


@command(epilog="Example: megaconv formats --json | jq .matrix.llama")
def formats(as_json: opt.Json = False) -> None:
    """List the known loaders and savers, and the naming schemes in which each model family can be read and written."""
    from megaconv.commands.catalogue import catalogue

    found = catalogue()
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        show(line)
