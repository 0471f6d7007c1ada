"""`megaconv clean`."""

from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.terminal import show


@command(epilog="Example: megaconv clean s3://models/my-llama --yes")
def clean(
    uri: Annotated[str, typer.Argument(help="The URI of an output in a store.", metavar="URI")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Also remove the work of a run on another host."),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """List what a killed run has left in an object store, and remove it with --yes.

    A killed run leaves its claim, its journal and uploads that were not completed. Other uploads are never touched.
    """
    from megaconv.commands.cleaning import clean as run

    found = run(uri, yes=yes, take_over=take_over)
    if as_json:
        print_json(found.to_json())
        return
    if not found.run:
        show(f"{uri}: no run has left anything")
        return
    for key in found.uploads:
        show(f"upload   {key}")
    for key in found.objects:
        show(f"object   {key}")
    state = "may be at work" if found.lives else "has ended"
    end = "removed" if found.removed else "give --yes to remove this"
    show(
        f"{uri}: {found.run} {state}; {len(found.uploads)} uploads and {len(found.objects)} objects; {end}"
    )
    for key in found.kept:
        show(f"stays    {key}")
    if found.kept:
        remedy = "remove them yourself" if found.removed else "its command completes the new one"
        show(
            f"{uri}: the run was replacing an output, of which {len(found.kept)} objects are left; {remedy}"
        )
