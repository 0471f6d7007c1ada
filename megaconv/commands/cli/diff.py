"""`megaconv diff`."""

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import has_blocks, show

_LIMIT = 50


@app.command(epilog="Example: megaconv diff Llama-2-7b ckpt && echo the same model")
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another, in any format and layout.", metavar="B")],
    config_too: Annotated[
        bool, typer.Option("--config-too", help="Let differences in the configurations count as well.")
    ] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Compare names, shapes and dtypes alone; reads no weights.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show how far each layer of B has moved from A, for a finetuned model.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write what --stats shows as a page for a browser, with plots."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Values that differ by no more than this are equal.")
    ] = 0.0,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Tensors that are listed one by one; 0: all.")] = _LIMIT,
    loader: opt.Loader = None,
    loader_a: opt.LoaderA = None,
    loader_b: opt.LoaderB = None,
    text_only: opt.TextOnly = False,
    option: opt.Option = None,
    optimizer: opt.ReadOptimizer = True,
    check_source: opt.CheckSource = True,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit status 0: the same; 4: they differ.

    Optimizer state is compared where both have it.
    """
    from megaconv.commands.comparison import diff_metadata, diff_sources, open_both, source_checks
    from megaconv.commands.movement import movement
    from megaconv.commands.progress import Progress
    from megaconv.commands.units import readable
    from megaconv.commands.views.report import movement_report, require_place
    from megaconv.engine.plan import default_workers
    from megaconv.errors import UsageError
    from megaconv.options import LoadOptions

    if not isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance}: is not a number; write one such as 1e-3")
    if metadata and (stats or html or tolerance):
        raise UsageError(
            "--metadata reads no weights, which --stats, --html and --tolerance are about; leave one of them out"
        )
    if html is not None:
        require_place(html)
    load = LoadOptions(
        optimizer=optimizer and not metadata, metadata_only=metadata, text_only=text_only, extra=opt.extra(option)
    )
    left, right = open_both(a, b, load, (loader_a or loader, loader_b or loader))
    if metadata:
        found, moved = diff_metadata(left, right), None
    else:
        checks = source_checks(a, left, b, right) if check_source else None
        workers = default_workers(writing=False)
        passes = 2 if stats or html else 1
        with Progress("comparing", lambda: passes * left.header.nbytes, shown=not quiet) as progress:
            found = diff_sources(left, right, workers, progress.advance, checks, tolerance)
            moved = movement(left, right, workers, progress.advance) if stats or html else None
    if html is not None and moved is not None:
        html.write_text(movement_report(a, b, left.header, found, moved), encoding="utf-8")
    if as_json:
        print_json(found.to_json() | ({} if moved is None else {"movement": moved.to_json()}))
    else:
        _print_diff(found, limit, "names, shapes and dtypes: " if metadata else "")
        for line in () if moved is None or not stats else moved.lines(blocks=has_blocks()):
            show(line)
        if html is not None:
            show(f"{html}: {readable(html.stat().st_size)}")
    if not found.same or (config_too and found.config):
        raise typer.Exit(4)


def _print_diff(found: Any, limit: int, compared: str) -> None:
    """compared: what alone was, where that isn't all of a tensor."""
    within = f", {found.within} of them within the tolerance" if found.within else ""
    if found.same:
        slots = f" ({', '.join(found.slots)})" if len(found.slots) > 1 else ""
        same = (
            f"the same {compared}{found.tensors} tensors"
            if compared
            else f"the same: {found.tensors} tensors are equal"
        )
        show(f"{same}{slots}{within}")
    else:
        show(f"different: {len(found.differences)} of {found.tensors} tensors{within}")
    for name, left, right in found.config:
        show(f"  configuration: {name} is {left!r} in A, {right!r} in B")
    kinds = found.kinds()
    if len(kinds) < len(found.differences):
        for kind, count in kinds.items():
            show(f"  {count} of {kind}")
    listed = found.differences[: limit or None]
    width = max((len(str(item.key)) for item in listed), default=0)
    for item in listed:
        largest = f", largest difference {item.max_abs:.3g}" if item.max_abs is not None else ""
        show(f"  {item.key!s:<{width}}  {item.kind:<9}  {item.detail}{largest}")
    if len(listed) < len(found.differences):
        show(f"  and {len(found.differences) - len(listed)} more (--limit 0 lists all)")
