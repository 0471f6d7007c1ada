"""`megaconv seal`."""

from typing import Annotated

import typer

from formats.wording import counted
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.options import LoadOptions, SealOptions
from megaconv.terminal import show


@command(epilog="Example: megaconv seal Llama-2-7b --key key.pem")
def seal(
    *,
    path: Annotated[str, typer.Argument(help="A checkpoint's directory.", metavar="DIR")],
    loader: str | None,
    load: LoadOptions,
    options: SealOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Seal a checkpoint of any format: write fingerprints of its tensors, and sign all its files.

    Writes megaconv.json, unless it is there, and model.sig, as OpenSSF's model signing defines it.
    `megaconv verify --public-key` and the package model-signing check the signature.
    """
    from megaconv.commands.progress import Progress
    from megaconv.commands.sealing import seal as run

    with Progress("sealing", shown=not quiet) as progress:
        found = run(path, options, load, loader, advance=progress.advance, expect=progress.expect)
    if as_json:
        print_json(found.to_json())
        return
    if found.fingerprint is not None:
        show(f"{counted(found.tensors, 'tensor')}, fingerprint {found.fingerprint}")
    if found.digest is None:
        show(f"sealed without a signature: {found.path}/megaconv.json")
    else:
        show(f"signed by {found.signer}: {counted(found.files, 'file')}, digest {found.digest}")
