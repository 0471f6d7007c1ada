"""`megaconv merge`."""

from dataclasses import replace
from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.convert import Request, run
from megaconv.commands.cli.parameters import command
from megaconv.options import ConvertOptions
from megaconv.options.values import adapter_choices

Base = Annotated[
    str, typer.Argument(help="The model that the adapter was trained on.", metavar="BASE")
]
Adapters = Annotated[
    list[str],
    typer.Argument(
        help="LoRA adapters, as peft saves them, or Hub ids; a weight may follow each.",
        metavar="ADAPTER[:WEIGHT]...",
    ),
]
MergeSaver = Annotated[
    str, typer.Option("--saver", help="Output format; `megaconv formats` lists all.")
]


@command(epilog="Example: megaconv merge Llama-2-7b my-adapter --save-dir Llama-2-7b-tuned")
def merge(
    *,
    base: Base,
    adapters: Adapters,
    save_dir: opt.SaveDir,
    saver: MergeSaver = "hf",
    options: ConvertOptions,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Merge LoRA adapters into the model that they were trained on. Short for `convert --adapter`, which shards as well."""
    options = replace(options, adapters=adapter_choices(adapters))
    run(Request(base, save_dir, saver, options, dry_run=dry_run, quiet=quiet, as_json=as_json))
