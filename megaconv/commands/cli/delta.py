"""`megaconv delta`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import say
from megaconv.options import LoadOptions
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.patches.making import PatchReport
    from megaconv.patches.sparse import SparseReport

Sparse = Annotated[
    str | None,
    typer.Option(
        "--sparse",
        metavar="ENGINE",
        help="Write the sparse weight update that an engine takes (vllm), in place of a patch.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing patch.")]

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue a killed run of the same command; keep finished work on Ctrl-C.",
    ),
]


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
    sparse: Sparse = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Write a patch: what changed between two checkpoints, lossless and compressed. `apply` makes NEW of OLD and the patch.

    Reads everything once. OLD and NEW may have different formats and layouts.
    """
    from formats.opened import OpenedFiles
    from megaconv.commands.comparison import find_both, open_both
    from megaconv.commands.progress import Progress
    from megaconv.engine.lineage import lineage_of_patch
    from megaconv.engine.plan import default_workers
    from megaconv.engine.target import refuse_place
    from megaconv.patches.making import make_patch
    from megaconv.patches.sparse import make_sparse, refuse_resume, require_engine

    refuse_place(save_dir)
    if sparse is not None:
        require_engine(sparse)
        refuse_resume(resume=resume)
        load = replace(load, optimizer=False)
    inputs = find_both(old, new, load, (loader, loader))
    opened = OpenedFiles()
    with opened:
        left, right = open_both(inputs, load)
    with Progress("comparing", shown=not quiet) as progress:
        nbytes = left.header.nbytes + right.header.nbytes
        if sparse is not None:
            progress.expect(2 * nbytes)
            update = make_sparse(
                left,
                right,
                Path(save_dir),
                engine=sparse,
                workers=default_workers(writing=False),
                overwrite=overwrite,
                advance=progress.advance,
            )
            _show_sparse(update, as_json=as_json)
            return
        progress.expect(nbytes)
        report = make_patch(
            left,
            right,
            Path(save_dir),
            options=load,
            workers=default_workers(writing=False),
            overwrite=overwrite,
            resume=resume,
            opened=opened,
            advance=progress.advance,
            lineage=lineage_of_patch(*inputs),
        )
    _show_patch(report, as_json=as_json)


def _show_patch(report: "PatchReport", *, as_json: bool) -> None:
    from megaconv.commands.units import readable

    if as_json:
        print_json(report.to_json())
        return
    for notice in report.notices:
        say(notice)
    share = 100 * report.nbytes / max(1, report.full_bytes)
    show(f"{report.changed} of {report.tensors} tensors differ, {len(report.removed)} are removed")
    show(f"{readable(report.nbytes)}, {share:.1f}% of {readable(report.full_bytes)}")
    show(f"{report.base.weights[:8]}… -> {report.new.weights[:8]}…")


def _show_sparse(report: "SparseReport", *, as_json: bool) -> None:
    from megaconv.commands.units import readable

    if as_json:
        print_json(report.to_json())
        return
    share = 100 * report.elements / max(1, report.all_elements)
    show(f"{report.changed} of {report.tensors} tensors differ")
    show(f"{report.elements:,} elements, {share:.2f}%, in {readable(report.nbytes)}")
    show(f"{report.base.weights[:8]}… -> {report.new.weights[:8]}…")
