"""The application that every command adds itself to, and what several of them need."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="megaconv",
    help="Convert LLM checkpoints between Hugging Face and Megatron at any parallel layout: streaming, bit-exact, without a GPU.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


HEADINGS = {
    "Input and output": "source target load_dir save_dir saver loader config base text_only adapter option "
    "checkpoint_type true_vocab_size push",
    "Layout": "tp pp vpp ep etp layer_split first_layers last_layers account_for_embedding account_for_loss layout_string "
    "split_rank encoder_pp",
    "Form of the output": "ckpt_format transformer_impl grouped_experts vocab_divisor vocab_padding release max_shard_size dist_files",
    "Values": "dtype quantize optimizer distributed_optimizer allow_lossy",
    "The run": "dry_run verify resume overwrite check_source max_memory workers quiet as_json",
}
"""Heading in --help -> parameters of a command that has many; others come last."""


class GroupedCommand(TyperCommand):
    """Lists its options under HEADINGS."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {each.name: record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))}
        for heading, names in HEADINGS.items():
            listed = [records.pop(name) for name in names.split() if name in records]
            if listed:
                with formatter.section(heading):
                    formatter.write_dl(listed)
        with formatter.section("Others"):
            formatter.write_dl(list(records.values()))


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
    from megaconv.engine.preparation import open_source

    return open_source(place, loader, replace(options, metadata_only=True))[1].header.nbytes


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
