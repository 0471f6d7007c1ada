"""`megaconv fingerprint`."""

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json, stored_bytes
from megaconv.terminal import show


@app.command(epilog="Example: megaconv fingerprint Llama-2-7b")
def fingerprint(
    path: opt.Input,
    loader: opt.Loader = None,
    config: opt.Config = None,
    true_vocab_size: opt.TrueVocab = None,
    text_only: opt.TextOnly = False,
    option: opt.Option = None,
    optimizer: opt.ReadOptimizer = True,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Hash a model: equal for the same weights in any format, naming scheme and layout. Reads everything.

    Optimizer state, where there is any, has a hash of its own.
    """
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import fingerprint as run
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, optimizer=optimizer, text_only=text_only, extra=opt.extra(option))
    with Progress("reading", lambda: stored_bytes(path, loader, options), shown=not quiet) as progress:
        found = run(path, options, advance=progress.advance, loader=loader)
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
