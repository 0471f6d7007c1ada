"""`megaconv demo`."""

from pathlib import Path
from typing import Annotated

import typer

from megaconv.commands.cli.parameters import command
from megaconv.local_paths import local_path


@command()
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            parser=local_path,
            metavar="PATH",
            help="Directory for the checkpoints; default: a temporary directory.",
        ),
    ] = None,
) -> None:
    """Build a small Llama, convert it to Megatron and back, and prove that it is still the same model."""
    from megaconv.commands.demo import run

    run(directory)
