"""`megaconv inspect`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import columns, folded, has_blocks, show

EXAMPLES = """\b
Examples:
  megaconv inspect ckpt --json | jq .layout
  megaconv inspect ckpt --tree
  megaconv inspect ckpt --tensors 'layers.0.*'"""


class _WithOptionalGlob(TyperCommand):
    """--tensors may stand without its GLOB, behind PATH or before another option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled: list[str] = []
        for word, after in zip(args, [*args, "--"][1:], strict=True):
            filled += [word, "*"] if word == "--tensors" and after.startswith("-") else [word]
        return super().parse_args(ctx, filled)


@app.command(cls=_WithOptionalGlob, epilog=EXAMPLES)
def inspect(
    path: opt.Input,
    tree: Annotated[
        bool, typer.Option("--tree", help="Modules with parameters and bytes; equal layers are one line.")
    ] = False,
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="[GLOB]", help="Tensors by canonical or native name, and where each lies."),
    ] = None,
    layout: Annotated[bool, typer.Option("--layout", help="A picture of ranks and layers.")] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Mean, deviation, extremes, zeros and a histogram of each tensor; reads all."),
    ] = False,
    megatron_args: Annotated[
        bool,
        typer.Option("--megatron-args", help="The flags with which Megatron-LM starts from it, one a line, quoted."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a report for a browser; with --stats it has plots."),
    ] = None,
    loader: opt.Loader = None,
    config: opt.Config = None,
    true_vocab_size: opt.TrueVocab = None,
    text_only: opt.TextOnly = False,
    option: opt.Option = None,
    check_source: opt.CheckSource = True,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a checkpoint is: format, family, parameters, sizes, dtypes, layout. Reads metadata only.

    Whatever holds tensors is looked at: a single file, an adapter, a model of an unknown architecture; and a config.json alone.
    Exit status 3: names or shapes of its tensors are not what its megaconv.json says.
    """
    from megaconv.commands.inspection import look
    from megaconv.hub import resolve
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, optimizer=False, text_only=text_only, extra=opt.extra(option))
    place = resolve(path, metadata_only=not stats)
    found: Any = replace(look(place, options, loader, check_source=check_source), path=path)
    shown: list[Any] = []
    width = columns()
    if any((tree, tensors is not None, layout, stats, megatron_args, html)):
        from megaconv.commands.views.requested import Asked, Subject, views

        asked = Asked(tree, tensors, layout, stats, megatron_args, html, quiet)
        shown = views(Subject(path, place, found, options), asked, blocks=has_blocks(), columns=width)
    if as_json:
        print_json({view.name: view.document for view in shown} if shown else found.to_json())
    elif shown:
        for line in (piece for view in shown for whole in view.lines for piece in folded(whole, width)):
            show(line)
        for note in (note for view in shown for note in view.notes):
            show(f"megaconv: {note}", sys.stderr)
    else:
        lines = list(found.lines())
        labels = max(len(label) for label, _ in lines)
        for label, text in lines:
            for line in folded(f"{label:<{labels}}  {text}", width, labels + 2):
                show(line)
    _end_if_changed(path, found)


def _end_if_changed(path: str, found: Any) -> None:
    if getattr(found, "differences", None):
        what = f"names or shapes of {len(found.differences)} tensors are not what its megaconv.json says"
        show(f"megaconv: error: {path}: {what}", sys.stderr)
        raise typer.Exit(3)
