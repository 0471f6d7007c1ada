"""`megaconv merge`."""

from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app
from megaconv.commands.cli.convert import convert

Base = Annotated[str, typer.Argument(help="The model that the adapter was trained on.", metavar="BASE")]
Adapters = Annotated[
    list[str],
    typer.Argument(
        help="LoRA adapters, as peft saves them, or Hub ids; a weight may follow each.", metavar="ADAPTER[:WEIGHT]..."
    ),
]
MergeSaver = Annotated[str, typer.Option("--saver", help="What to write; `megaconv formats` lists all.")]


@app.command(epilog="Example: megaconv merge Llama-2-7b my-adapter --save-dir Llama-2-7b-tuned")
def merge(
    base: Base,
    adapters: Adapters,
    save_dir: opt.SaveDir,
    saver: MergeSaver = "hf",
    loader: opt.Loader = None,
    config: opt.Config = None,
    dtype: opt.Dtype = None,
    max_memory: opt.MaxMemory = "256MiB",
    workers: opt.Workers = 0,
    verify: opt.Verify = False,
    dry_run: opt.DryRun = False,
    resume: opt.Resume = False,
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Merge LoRA adapters into the model that they were trained on. Short for `convert --adapter`, which shards as well."""
    convert(
        saver, base, save_dir, loader=loader, config=config, dtype=dtype, adapter=adapters, max_memory=max_memory, workers=workers,
        verify=verify, dry_run=dry_run, resume=resume, overwrite=overwrite, quiet=quiet, as_json=as_json,
    )  # fmt: skip
