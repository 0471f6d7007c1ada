"""`megaconv delta`."""

from pathlib import Path
from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import say
from megaconv.options import LoadOptions
from megaconv.terminal import show

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing patch.")]


@command(epilog="Example: megaconv delta run/iter_0000100 run/iter_0000200 --save-dir patch")
def delta(
    *,
    old: Annotated[
        str, typer.Argument(help="The base: a checkpoint of any format.", metavar="OLD")
    ],
    new: Annotated[
        str, typer.Argument(help="The newer checkpoint, of any format and layout.", metavar="NEW")
    ],
    save_dir: opt.SaveDir,
    loader: str | None,
    load: LoadOptions,
    overwrite: Overwrite = False,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Write a patch: what changed between two checkpoints, lossless and compressed. `apply` makes NEW of OLD and the patch.

    Reads everything once. OLD and NEW may have different formats and layouts.
    """
    from megaconv.commands.comparison import find_both, open_both
    from megaconv.commands.progress import Progress
    from megaconv.commands.units import readable
    from megaconv.engine.lineage import lineage_of_patch
    from megaconv.engine.plan import default_workers
    from megaconv.engine.target import refuse_place
    from megaconv.patches.making import make_patch

    refuse_place(save_dir)
    inputs = find_both(old, new, load, (loader, loader))
    left, right = open_both(inputs, load)
    with Progress("comparing", shown=not quiet) as progress:
        progress.expect(left.header.nbytes + right.header.nbytes)
        report = make_patch(
            left,
            right,
            Path(save_dir),
            options=load,
            workers=default_workers(writing=False),
            overwrite=overwrite,
            advance=progress.advance,
            lineage=lineage_of_patch(*inputs),
        )
    if as_json:
        print_json(report.to_json())
        return
    for notice in report.notices:
        say(notice)
    share = 100 * report.nbytes / max(1, report.full_bytes)
    show(f"{report.changed} of {report.tensors} tensors differ, {len(report.removed)} are removed")
    show(f"{readable(report.nbytes)}, {share:.1f}% of {readable(report.full_bytes)}")
    show(f"{report.base.weights[:8]}… -> {report.new.weights[:8]}…")
