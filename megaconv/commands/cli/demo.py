"""`megaconv demo`."""

from pathlib import Path
from typing import Annotated

import typer

from megaconv.commands.cli.app import app


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep what is made; a temporary directory otherwise.")
    ] = None,
) -> None:
    """Build a small Llama, convert it to Megatron and back, and prove that it is still the same model."""
    from megaconv.commands.demo import run

    run(directory)
