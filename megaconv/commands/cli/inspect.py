"""`megaconv inspect`."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from formats.wording import counted
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.local_paths import local_path
from megaconv.options import LoadOptions
from megaconv.terminal import columns, folded, has_blocks, show

EXAMPLES = """\b
Examples:
  megaconv inspect ckpt --json | jq .layout
  megaconv inspect ckpt --tree
  megaconv inspect ckpt --tensors 'layers.0.*'"""


class _WithOptionalGlob(TyperCommand):
    """Lets --tensors stand without its GLOB, behind PATH or before another option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled: list[str] = []
        for word, after in zip(args, [*args, "--"][1:], strict=True):
            filled += [word, "*"] if word == "--tensors" and after.startswith("-") else [word]
        return super().parse_args(ctx, filled)


@command(cls=_WithOptionalGlob, epilog=EXAMPLES)
def inspect(
    *,
    path: opt.Input,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree", help="Modules with parameters and bytes; equal layers are one line."
        ),
    ] = False,
    tensors: Annotated[
        str | None,
        typer.Option(
            "--tensors",
            metavar="[GLOB]",
            help="Tensors by canonical or native name, and where each lies.",
        ),
    ] = None,
    layout: Annotated[
        bool, typer.Option("--layout", help="A picture of ranks and layers.")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Mean, deviation, extremes, zeros and a histogram of each tensor; reads all.",
        ),
    ] = False,
    megatron_args: Annotated[
        bool,
        typer.Option(
            "--megatron-args",
            help="The flags with which Megatron-LM starts from it, one a line, quoted.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            parser=local_path,
            metavar="FILE",
            help="Write a report for a browser; with --stats it has plots.",
        ),
    ] = None,
    loader: str | None,
    load: LoadOptions,
    check_source: bool,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a checkpoint is: format, family, parameters, sizes, dtypes, layout. Reads metadata only.

    PATH may be anything that holds tensors: a single file, an adapter, a model of an unknown architecture. It may also
    be a config.json alone.
    Exit status 3: names or shapes of its tensors differ from its megaconv.json.
    """
    from megaconv.commands.inspection import look
    from megaconv.hub import resolve

    options = replace(load, optimizer=False)
    place = resolve(path)
    found: Any = look(path, place, options, loader, check_source=check_source)
    shown: list[Any] = []
    width = columns()
    if any((tree, tensors is not None, layout, stats, megatron_args, html)):
        from megaconv.commands.views.requested import Asked, Subject, views

        asked = Asked(tree, tensors, layout, stats, megatron_args, html, quiet)
        subject = Subject(path, place, found, options)
        shown = views(subject, asked, blocks=has_blocks(), columns=width)
    if as_json:
        print_json({view.name: view.document for view in shown} if shown else found.to_json())
    elif shown:
        _show_views(shown, width)
    else:
        _show_facts(found, width)
    _end_if_changed(path, found)


def _show_views(shown: Iterable[Any], width: int | None) -> None:
    for view in shown:
        for line in view.lines:
            for piece in folded(line, width):
                show(piece)
    for view in shown:
        for note in view.notes:
            show(f"megaconv: {note}", sys.stderr)


def _show_facts(found: Any, width: int | None) -> None:
    lines = list(found.lines())
    labels = max(len(label) for label, _ in lines)
    for label, text in lines:
        for piece in folded(f"{label:<{labels}}  {text}", width, labels + 2):
            show(piece)


def _end_if_changed(path: str, found: Any) -> None:
    if getattr(found, "differences", None):
        what = f"names or shapes of {counted(len(found.differences), 'tensor')} differ from its megaconv.json"
        show(f"megaconv: error: {path}: {what}", sys.stderr)
        raise typer.Exit(3)
