"""`megaconv apply`."""

from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.convert import Request, run
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import how_to_continue
from megaconv.options import ConvertOptions

Patches = Annotated[
    list[str],
    typer.Argument(
        help="Patches of `megaconv delta`, in the order in which they apply.", metavar="PATCH..."
    ),
]
ApplySaver = Annotated[
    str | None,
    typer.Option("--saver", help="Output format (default: the format and the layout of OLD)."),
]


@command(epilog="Example: megaconv apply run/iter_0000100 patch --save-dir new")
def apply(
    *,
    old: Annotated[
        str,
        typer.Argument(help="The checkpoint that the first patch was made from.", metavar="OLD"),
    ],
    patches: Patches,
    save_dir: opt.SaveDir,
    saver: ApplySaver = None,
    options: ConvertOptions,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Make the newer checkpoint from a base and patches. The output's fingerprint is compared with that of the original.

    Checks the base and the patches before it writes a byte.
    """
    from megaconv.commands.progress import Progress
    from megaconv.patches.applying import prepare

    explained = how_to_continue(resume=options.resume)
    with explained, Progress("checking the base", shown=not quiet) as progress:
        found = prepare(old, patches, saver, options, progress.advance)
    run(
        Request(
            found.load_dir,
            save_dir,
            found.saver,
            found.options,
            dry_run=dry_run,
            quiet=quiet,
            as_json=as_json,
        )
    )
