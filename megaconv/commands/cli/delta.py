"""`megaconv delta`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from formats.wording import counted
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import how_to_continue, say
from megaconv.options import ConvertOptions
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
    options: ConvertOptions,
    sparse: Sparse = None,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Write a patch: what changed between two checkpoints, lossless and compressed. `apply` makes NEW of OLD and the patch.

    Reads everything once. OLD and NEW may have different formats and layouts.
    """
    from megaconv.commands.progress import Progress
    from megaconv.patches.between import Watcher, make_between
    from megaconv.patches.sparse import SparseReport

    # A sparse update can't be resumed.
    explained = nullcontext() if sparse else how_to_continue(resume=options.resume)
    with explained, Progress("comparing", shown=not quiet) as progress:
        watcher = Watcher(progress.expect, progress.advance)
        report = make_between(old, new, save_dir, options, sparse, watcher)
    if isinstance(report, SparseReport):
        _show_sparse(report, as_json=as_json)
    else:
        _show_patch(report, as_json=as_json)


def _show_patch(report: "PatchReport", *, as_json: bool) -> None:
    from megaconv.commands.units import readable

    if as_json:
        print_json(report.to_json())
        return
    for notice in report.notices:
        say(notice)
    share = 100 * report.nbytes / max(1, report.full_bytes)
    changed = f"{report.changed} of {counted(report.tensors, 'tensor')} changed"
    show(f"{changed}, {len(report.removed)} removed")
    show(f"{readable(report.nbytes)}, {share:.1f}% of {readable(report.full_bytes)}")
    show(f"{report.base.weights[:8]}… -> {report.new.weights[:8]}…")


def _show_sparse(report: "SparseReport", *, as_json: bool) -> None:
    from megaconv.commands.units import readable

    if as_json:
        print_json(report.to_json())
        return
    share = 100 * report.elements / max(1, report.all_elements)
    show(f"{report.changed} of {counted(report.tensors, 'tensor')} changed")
    show(f"{report.elements:,} elements, {share:.2f}%, in {readable(report.nbytes)}")
    show(f"{report.base.weights[:8]}… -> {report.new.weights[:8]}…")
