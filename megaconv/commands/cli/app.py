"""The application that every command adds itself to, and code that several commands share."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megaconv.json_text import json_text
from megaconv.options.option import HEADINGS
from megaconv.terminal import put

app = typer.Typer(
    name="megaconv",
    help="Convert LLM checkpoints between Hugging Face and Megatron at any parallel layout: streaming, bit-exact, without a GPU.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


class GroupedCommand(TyperCommand):
    """A command that lists its parameters under their headings. Parameters without a heading come last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            heading: [] for heading in (*HEADINGS, "Others")
        }
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                heading = getattr(each, "rich_help_panel", None) or "Others"
                sections[heading].append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


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


def print_json(document: Any) -> None:
    put(json_text(document, indent=1), sys.stdout)
