"""`megaconv formats`."""

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import show


@app.command(epilog="Example: megaconv formats --json | jq .matrix.llama")
def formats(as_json: opt.Json = False) -> None:
    """List the loaders and savers that are known, and which model family can be read and written in which naming."""
    from megaconv.commands.catalogue import catalogue

    found = catalogue()
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        show(line)
