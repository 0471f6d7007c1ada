"""`megaconv average`."""

from dataclasses import replace
from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.convert import Request, run
from megaconv.commands.cli.merge import MergeSaver
from megaconv.commands.cli.parameters import command
from megaconv.options import ConvertOptions
from megaconv.options.model_shares import divided, model_shares

Models = Annotated[
    list[str],
    typer.Argument(
        help="Checkpoints of one model, of any formats and layouts, or Hub ids; a share of the average may follow each.",
        metavar="MODEL[:SHARE]...",
    ),
]


@command(
    epilog="Examples: megaconv average run/iter_0000800 run/iter_0000900 run/iter_0001000 --save-dir averaged; "
    "megaconv average base math code --method ties --density 0.2 --save-dir both"
)
def average(
    *,
    models: Models,
    save_dir: opt.SaveDir,
    saver: MergeSaver = "hf",
    options: ConvertOptions,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Average the weights of several checkpoints of one model, also by SLERP, TIES or DARE.

    Short for `convert --average`, which shards as well.
    """
    first, others = divided(model_shares(models), options.average_method.method)
    options = replace(options, averaged=others)
    run(Request(first, save_dir, saver, options, dry_run=dry_run, quiet=quiet, as_json=as_json))
