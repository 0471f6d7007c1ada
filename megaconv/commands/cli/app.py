"""The application that every command adds itself to, and what several of them need."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="megaconv",
    help="Convert LLM checkpoints between Hugging Face and Megatron at any parallel layout: streaming, bit-exact, without a GPU.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        from megaconv._version import __version__

        typer.echo(f"megaconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def stored_bytes(place: str, loader: str | None, options: Any) -> int:
    """The bytes of a checkpoint's tensors, for the bar of a command that reads all of them."""
    from megaconv.engine.conversion import open_source

    return open_source(place, loader, replace(options, metadata_only=True))[1].header.nbytes


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
