"""Parameters that only the command line has: places, what to print, and the spellings of Megatron-LM's own converter.

Every other option is a field of a class in `megaconv.options`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from megaconv.errors import UsageError
from megaconv.options import ConvertOptions
from megaconv.options.option import INPUT_AND_OUTPUT, LAYOUT, RUN
from megaconv.terminal import hide_download_bars

if TYPE_CHECKING:
    from megaconv.model.config import ModelConfig

CONVERT_EXAMPLES = """\b
Examples:
  megaconv convert --load-dir Llama-2-7b --saver core --save-dir ckpt --tp 2 --pp 2
  megaconv convert --load-dir ckpt --saver core --save-dir tp4 --tp 4 --pp 1
  megaconv convert ckpt Llama-back --saver hf
  megaconv convert Llama-2-7b chat --saver hf --tokenizer my-tokenizer    # rows for new tokens"""


Input = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a Hub id such as hf://org/name@revision.", metavar="PATH"
    ),
]
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[SRC]", help="The input, as --load-dir has it.", rich_help_panel=INPUT_AND_OUTPUT
    ),
]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[DST]",
        help="The output directory, as --save-dir has it.",
        rich_help_panel=INPUT_AND_OUTPUT,
    ),
]
LoadDir = Annotated[
    str | None,
    typer.Option(
        "--load-dir",
        "--load",
        metavar="PATH",
        help="Input: a directory of any known format, or a Hub id (org/name or hf://org/name@revision).",
        rich_help_panel=INPUT_AND_OUTPUT,
    ),
]
_SAVE_DIR = typer.Option(
    "--save-dir",
    "--save",
    metavar="PATH",
    help="Output directory; must not exist yet, or be empty.",
    rich_help_panel=INPUT_AND_OUTPUT,
)
SaveDir = Annotated[str, _SAVE_DIR]  # a text, which may be empty, unlike a path
OptionalSaveDir = Annotated[str | None, _SAVE_DIR]
Saver = Annotated[
    str,
    typer.Option(
        "--saver",
        help="Output format: core, legacy, dcp, deepspeed, hf, llama_mistral, gguf, mlx, trtllm or peft "
        "(`megaconv formats` describes them). A Megatron checkpoint for which sizes are given keeps its format without it.",
        rich_help_panel=INPUT_AND_OUTPUT,
    ),
]
Push = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="ORG/NAME",
        help="Put the output on the Hugging Face Hub too; see `megaconv push`.",
        rich_help_panel=INPUT_AND_OUTPUT,
    ),
]
LoaderA = Annotated[
    str | None, typer.Option("--loader-a", help="Input format of A, if it differs from --loader.")
]
LoaderB = Annotated[
    str | None, typer.Option("--loader-b", help="Input format of B, if it differs from --loader.")
]
EncoderPp = Annotated[
    int | None,
    typer.Option(
        "--encoder-pipeline-model-parallel-size",
        min=1,
        help="T5 only: pipeline stages of the encoder; --pp then counts the stages of the decoder (1 by default).",
        rich_help_panel=LAYOUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print every output file with its size and the memory needed; write nothing.",
        rich_help_panel=RUN,
    ),
]


def _quiet_downloads(quiet: bool) -> bool:
    hide_download_bars(quiet=quiet)
    return quiet


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_quiet_downloads,
        help="Print neither progress nor a summary; warnings and errors alone.",
        rich_help_panel=RUN,
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=_quiet_downloads, help="Show no progress; the result is printed."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=RUN)
]

# Megatron-LM's converter has these options too; a checkpoint itself contains most of them.
Bf16 = Annotated[bool, typer.Option("--bf16", hidden=True)]
Fp16 = Annotated[bool, typer.Option("--fp16", hidden=True)]
ModelType = Annotated[str | None, typer.Option("--model-type", hidden=True)]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--megatron-path", "--tokenizer-model", "--vocab-file", "--model-size", "--max-queue-size",
        "--position-embedding-type", "--loader-transformer-impl", hidden=True,
    ),
]  # fmt: skip
IgnoredFlag = Annotated[bool, typer.Option("--no-checking", hidden=True)]


def with_encoder_stages(options: ConvertOptions, encoder_pp: int | None) -> ConvertOptions:
    """The options with the encoder's stages in pp. Raises UsageError if both ways to give them are used."""
    if encoder_pp is None:
        return options
    save = options.save
    if save.split.split_rank is not None:
        raise UsageError(
            "--pipeline-model-parallel-split-rank counts the encoder's stages in --pp, --encoder-pipeline-model-parallel-size "
            "doesn't; give one of them"
        )
    stages = encoder_pp + (save.pp or 1)
    return replace(
        options, save=replace(save, pp=stages, split=replace(save.split, split_rank=encoder_pp))
    )


def one_place(argument: str | None, option: str | None, what: str, name: str) -> str:
    """The place, given as an argument or by its option. Raises UsageError for none, or both."""
    given = [word for word in (argument, option) if word is not None]
    if len(given) != 1:
        found = (
            "is missing" if not given else f"is given twice, as {argument} and by {name} {option}"
        )
        raise UsageError(
            f"the {what} {found}; write: megaconv convert SRC DST --saver NAME, or {name} PATH"
        )
    return given[0]


def file_at(place: str, name: str) -> str:
    """The path or the URI of a file of an output."""
    return f"{place.rstrip('/')}/{name}"


def one_dtype(dtype: str | None, bf16: bool, fp16: bool) -> str | None:
    """The requested dtype. Raises UsageError for several."""
    asked = [word for word, given in ((dtype, dtype), ("bf16", bf16), ("fp16", fp16)) if given]
    if len(asked) > 1:
        raise UsageError(f"--dtype {asked[0]} and --{asked[1]} contradict each other; give one")
    return asked[0] if asked else None


def check_known_type(model_type: str | None) -> None:
    """Raises UsageError for an unknown model type."""
    if model_type not in (None, *_MODEL_TYPES):
        raise UsageError(
            f"--model-type {model_type}: is not known; choose one of {', '.join(_MODEL_TYPES)}"
        )


def check_model_type(model_type: str | None, config: "ModelConfig") -> None:
    """Raises UsageError if the model is of another type than the given one."""
    found = "GPT"
    if config.encoder.layers:
        found = "T5"
    elif config.has("both_ways"):
        found = "BERT"
    if model_type not in (None, found):
        raise UsageError(
            f"--model-type {model_type}: the model is a {found} ({config.family}); give {found}, or leave it out"
        )


_MODEL_TYPES = ("GPT", "BERT", "T5")
