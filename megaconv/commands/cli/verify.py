"""`megaconv verify`."""

from typing import TYPE_CHECKING

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import say
from megaconv.options import LoadOptions, SealOptions
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.signatures.checking import Signed


@command(epilog="Example: megaconv verify ckpt && echo as it was written")
def verify(
    *,
    path: opt.Input,
    loader: str | None,
    load: LoadOptions,
    seal: SealOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Compare a checkpoint with the fingerprints in its megaconv.json. Exit status 0: as written; 4: it differs.

    Configuration, tokenizer and other small files are compared with the hashes there. With --public-key or --identity, a
    signature is required first: every file must be as it was signed.
    """
    from megaconv.commands.progress import Progress
    from megaconv.commands.verification import verify as run

    with Progress("verifying", shown=not quiet) as progress:
        found = run(
            path, load, advance=progress.advance, loader=loader, expect=progress.expect, seal=seal
        )
    if found.has_unchecked_signature:
        say("the signature in model.sig was not checked; pass --public-key or --identity")
    if as_json:
        print_json(found.to_json())
        raise typer.Exit(0 if found.same else 4)
    if found.signed is not None:
        _show_signature(found.signed)
    if not found.is_recorded:
        show("no megaconv.json: the tensors have no fingerprints to compare with")
    elif found.same:
        files = f" and {found.files} other file{'s' * (found.files != 1)}" if found.files else ""
        show(f"as written: {found.tensors} tensors{files}, fingerprint {found.found}")
    else:
        show(f"different: fingerprint {found.found}, written was {found.recorded}")
        for name, kind in found.differences.items():
            show(f"  {name}  {kind}")
    if not found.same:
        raise typer.Exit(4)


def _show_signature(signed: "Signed") -> None:
    show(f"as signed: {signed.resources} files, digest {signed.root}")
    if signed.left_out:
        say(f"the signature doesn't cover {', '.join(signed.left_out)}")
