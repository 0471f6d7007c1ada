"""`megaconv diff`."""

from typing import Annotated, Any

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import show


@app.command(epilog="Example: megaconv diff Llama-2-7b ckpt && echo the same model")
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another, in any format and layout.", metavar="B")],
    config_too: Annotated[
        bool, typer.Option("--config-too", help="Let differences in the configurations count as well.")
    ] = False,
    loader: opt.Loader = None,
    loader_a: opt.LoaderA = None,
    loader_b: opt.LoaderB = None,
    option: opt.Option = None,
    optimizer: opt.ReadOptimizer = True,
    check_source: opt.CheckSource = True,
    as_json: opt.Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit status 0: the same; 4: they differ.

    Optimizer state is compared where both have it.
    """
    from megaconv.commands.comparison import diff_sources, open_both, source_checks
    from megaconv.commands.progress import Progress
    from megaconv.engine.plan import default_workers
    from megaconv.options import LoadOptions

    load = LoadOptions(optimizer=optimizer, extra=opt.extra(option))
    left, right = open_both(a, b, load, (loader_a or loader, loader_b or loader))
    checks = source_checks(a, left, b, right) if check_source else None
    with Progress("comparing", lambda: left.header.nbytes) as progress:
        found = diff_sources(left, right, default_workers(writing=False), progress.advance, checks)
    if as_json:
        print_json(found.to_json())
    else:
        _print_diff(found)
    if not found.same or (config_too and found.config):
        raise typer.Exit(4)


def _print_diff(found: Any) -> None:
    if found.same:
        slots = f" ({', '.join(found.slots)})" if len(found.slots) > 1 else ""
        show(f"the same: {found.tensors} tensors are equal{slots}")
    else:
        show(f"different: {len(found.differences)} of {found.tensors} tensors")
        width = max(len(str(item.key)) for item in found.differences)
        for item in found.differences:
            largest = f", largest difference {item.max_abs:.3g}" if item.max_abs is not None else ""
            show(f"  {item.key!s:<{width}}  {item.kind:<9}  {item.detail}{largest}")
    for name, left, right in found.config:
        show(f"  configuration: {name} is {left!r} in A, {right!r} in B")
