"""`megaconv inspect`."""

import sys
from typing import Any

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import show


@app.command(epilog="Example: megaconv inspect ckpt --json | jq .layout")
def inspect(
    path: opt.Input,
    loader: opt.Loader = None,
    config: opt.Config = None,
    true_vocab_size: opt.TrueVocab = None,
    option: opt.Option = None,
    check_source: opt.CheckSource = True,
    as_json: opt.Json = False,
) -> None:
    """Show what a checkpoint is: format, family, parameters, sizes, dtypes, layout. Reads metadata only.

    Whatever holds tensors is looked at: a single file, an adapter, a model of an unknown architecture.
    Exit status 3: names or shapes of its tensors are not what its megaconv.json says.
    """
    from megaconv.commands.inspection import look
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, optimizer=False, extra=opt.extra(option))
    found: Any = look(path, options, loader, check_source=check_source)
    if as_json:
        print_json(found.to_json())
    else:
        for label, text in found.lines():
            show(f"{label:<11} {text}")
    if getattr(found, "differences", None):
        what = f"names or shapes of {len(found.differences)} tensors are not what its megaconv.json says"
        show(f"megaconv: error: {path}: {what}", sys.stderr)
        raise typer.Exit(3)
