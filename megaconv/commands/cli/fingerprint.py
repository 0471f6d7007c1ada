"""`megaconv fingerprint`."""

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.options import LoadOptions
from megaconv.terminal import show


@command(epilog="Example: megaconv fingerprint Llama-2-7b")
def fingerprint(
    *,
    path: opt.Input,
    loader: str | None,
    load: LoadOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Hash a model: equal for the same weights in any format, naming scheme and layout. Reads everything.

    Optimizer state, if there is any, has a separate hash.
    """
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import fingerprint as run

    with Progress("reading", shown=not quiet) as progress:
        found = run(path, load, advance=progress.advance, loader=loader, expect=progress.expect)
    if as_json:
        print_json(
            {
                "weights": found.weights,
                "optimizer": found.optimizer,
                "tensors": {str(key): digest for key, digest in found.tensors.items()},
            }
        )
    else:
        show(found.weights)
        if found.optimizer is not None:
            show(f"{found.optimizer} (optimizer)")
