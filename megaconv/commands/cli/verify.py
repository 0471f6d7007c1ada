"""`megaconv verify`."""

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.options import LoadOptions
from megaconv.terminal import show


@command(epilog="Example: megaconv verify ckpt && echo as it was written")
def verify(
    *,
    path: opt.Input,
    loader: str | None,
    load: LoadOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Compare a checkpoint with the fingerprints in its megaconv.json. Exit status 0: as written; 4: it differs.

    Configuration, tokenizer and other small files are compared with the hashes there.
    """
    from megaconv.commands.progress import Progress
    from megaconv.commands.verification import verify as run

    with Progress("verifying", shown=not quiet) as progress:
        found = run(path, load, advance=progress.advance, loader=loader, expect=progress.expect)
    if as_json:
        print_json(found.to_json())
    elif found.same:
        files = f" and {found.files} other file{'s' * (found.files != 1)}" if found.files else ""
        show(f"as written: {found.tensors} tensors{files}, fingerprint {found.found}")
    else:
        show(f"different: fingerprint {found.found}, written was {found.recorded}")
        for name, kind in found.differences.items():
            show(f"  {name}  {kind}")
    if not found.same:
        raise typer.Exit(4)
