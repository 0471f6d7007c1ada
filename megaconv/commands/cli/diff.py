"""`megaconv diff`."""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from formats.wording import are, counted
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.local_paths import local_path, require_page
from megaconv.options import LoadOptions
from megaconv.terminal import has_blocks, show


@command(epilog="Example: megaconv diff Llama-2-7b ckpt && echo the same model")
def diff(
    *,
    a: Annotated[str, typer.Argument(help="A checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another, in any format and layout.", metavar="B")],
    config_too: Annotated[
        bool,
        typer.Option("--config-too", help="Let differences in the configurations count as well."),
    ] = False,
    metadata: Annotated[
        bool,
        typer.Option(
            "--metadata", help="Compare names, shapes and dtypes alone; reads no weights."
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Show how far each layer of B has moved from A, for a finetuned model."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            parser=local_path,
            metavar="FILE",
            help="Write the result of --stats as a page for a browser, with plots.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", min=0, help="Values that differ by no more than this are equal."
        ),
    ] = 0.0,
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor that differs, behind the summary.")
    ] = False,
    loader: str | None,
    loader_a: opt.LoaderA = None,
    loader_b: opt.LoaderB = None,
    load: LoadOptions,
    check_source: bool,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit status 0: the same; 4: they differ.

    Optimizer state is compared if both have it.
    """
    from formats.whole_file import write_whole
    from megaconv.commands.comparable import require_weights
    from megaconv.commands.comparison import (
        diff_metadata,
        diff_sources,
        find_both,
        open_both,
        source_checks,
    )
    from megaconv.commands.movement import movement
    from megaconv.commands.progress import Progress
    from megaconv.commands.units import readable
    from megaconv.commands.views.report import movement_report
    from megaconv.engine.plan import default_workers
    from megaconv.errors import UsageError

    if not isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance}: is not a number; write one such as 1e-3")
    needs_weights = stats or html or tolerance
    if metadata and needs_weights:
        raise UsageError(
            "--metadata reads no weights, which --stats, --html and --tolerance are about; leave one of them out"
        )
    if html is not None:
        require_page("--html", html)
    options = replace(load, optimizer=load.optimizer and not metadata, metadata_only=metadata)
    inputs = find_both(a, b, options, (loader_a or loader, loader_b or loader))
    left, right = open_both(inputs, options)
    if stats or html:
        require_weights("--stats" if stats else "--html", left.header, right.header)
    if metadata:
        found, moved = diff_metadata(left, right), None
    else:
        checks = source_checks(inputs, (left, right)) if check_source else None
        workers = default_workers(writing=False)
        passes = 2 if stats or html else 1
        with Progress("comparing", shown=not quiet) as progress:
            progress.expect(passes * left.header.nbytes)
            found = diff_sources(left, right, workers, progress.advance, checks, tolerance)
            moved = movement(left, right, workers, progress.advance) if stats or html else None
    if html is not None and moved is not None:
        write_whole(html, movement_report(a, b, left.header, found, moved).encode())
    if as_json:
        print_json(found.to_json() | ({} if moved is None else {"movement": moved.to_json()}))
    else:
        _print_summary(found, "names, shapes and dtypes: " if metadata else "")
        if stats and moved is not None:
            for line in moved.lines(blocks=has_blocks()):
                show(line)
        if every:
            _print_tensors(found)
        elif any(group.count > 1 for group in found.groups()):
            show("--all lists each tensor that differs")
        if html is not None:
            show(f"{html}: {readable(html.stat().st_size)}")
    if not found.same or (config_too and found.config):
        raise typer.Exit(4)


def _verdict(found: Any, compared: str) -> str:
    """The first line of the summary."""
    within = f", {found.within} of them within the tolerance" if found.within else ""
    if not found.same:
        return f"different: {len(found.differences)} of {counted(found.tensors, 'tensor')}{within}"
    slots = f" ({', '.join(found.slots)})" if len(found.slots) > 1 else ""
    if compared:
        return f"the same {compared}{counted(found.tensors, 'tensor')}{slots}{within}"
    return f"the same: {counted(found.tensors, 'tensor')} {are(found.tensors)} equal{slots}{within}"


def _print_summary(found: Any, compared: str) -> None:
    """Print the summary. compared: the compared part, if it isn't the whole tensors."""
    show(_verdict(found, compared))
    for name, left, right in found.config:
        show(f"  configuration: {name} is {left!r} in A, {right!r} in B")
    groups = found.groups()
    width = max((len(group.name) for group in groups), default=0)
    for group in groups:
        show(f"  {group.name:<{width}}  {group}")


def _print_tensors(found: Any) -> None:
    width = max((len(str(item.key)) for item in found.differences), default=0)
    for item in found.differences:
        largest = f", largest difference {item.max_abs:.3g}" if item.max_abs is not None else ""
        show(f"  {item.key!s:<{width}}  {item.kind:<9}  {item.detail}{largest}")
