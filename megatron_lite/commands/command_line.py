"""The command line: `megatron-lite pretrain | finetune | preprocess | generate ...`. torchrun starts it in every process.

Training commands import their flags when they run, as other commands import their work.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from megaconv.errors import CheckpointError, UsageError
from megaconv.extras import require_torch
from megaconv.terminal import hide_download_bars, in_words, is_of_stream, open_closed_streams
from megatron_lite.commands.catalog import OTHERS, WITHOUT_TORCH
from megatron_lite.processes.failure import refuse
from megatron_lite.processes.slurm import adopt
from megatron_lite.settings.training_commands import DESCRIPTIONS

if TYPE_CHECKING:
    from megatron_lite.settings.config import Settings
    from megatron_lite.settings.short_form import ShortForm

USAGE = """usage: megatron-lite COMMAND [FLAGS]

commands:
  pretrain      {pretrain}
  finetune      {finetune}
  plan          What a run would take: memory of each rank, bytes between ranks, the pipeline's bubble.
  preprocess    Turn text into Megatron's indexed files.
  data          Prepare a corpus of text: clean, dedup, decontaminate, split, score and others.
  generate      Let a model continue texts.
  chat          Talk with a model.
  score         Log-probabilities of given tokens.
  serve         A model behind OpenAI's and Anthropic's routes and Megatron's PUT /api.
  evaluate      Measure a model on zero-shot tasks, on a corpus, or on tasks of lm-eval.
  rank-layers   Measure how much each layer changes its input, to leave layers out.
  rank-experts  Measure how much each expert adds to its layer's output, to leave experts out.
  rank-channels Measure how much each channel and head adds, to make a model narrower.
  calibrate     Measure the inputs of each matrix, for `megaconv convert --quantize fp8 --calibration`.
  retro         Build or show the chunk database and the neighbours for Retro.
  embed         Vectors of texts by a model, or of passages for retrieve.
  retrieve      Find passages for questions, and count those with an answer.
  models        List the families of models, and which of them can be trained.
  recipes       List settings for common models, for finetune --recipe.
  plot          Draw the curves of runs side by side, in the terminal or as a page.
  completion    Print a script that completes commands and flags in bash, zsh or fish.

`megatron-lite COMMAND --help` lists the flags of a command. Several processes are started by torchrun or srun:
  torchrun --nproc-per-node 4 -m megatron_lite pretrain --tensor-model-parallel-size 2 ...
"""


def run(arguments: Sequence[str]) -> None:
    """Run a command and end the process with its exit status: 0 done, 1 failed, 2 wrong usage, 3 an input is corrupt."""
    open_closed_streams()
    hide_download_bars()
    words = list(arguments)
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        with _written_output():
            print(USAGE.format(**DESCRIPTIONS) if _is_first() else "", end="")
        sys.exit(0 if words else 2)
    if command == "--version":
        from megaconv._version import __version__

        with _written_output():
            print(f"megatron-lite {__version__}")
        sys.exit(0)
    # megaconv's import makes sure that this is its own `formats`.
    from formats.file_limit import raise_file_limit

    raise_file_limit()
    if command not in WITHOUT_TORCH and not _asks_for_help(words):
        import numpy  # noqa: F401 - torch imports it too, and would ignore a Ctrl-C that arrives meanwhile

    if command in OTHERS:
        sys.exit(_run_other(command, words[1:]))
    if command not in DESCRIPTIONS:
        _refuse(f"unknown command {command!r}; {_remedy(command)}")
    _train(command, words[1:])


def _remedy(command: str) -> str:
    """Return a hint for a command that megatron-lite doesn't have."""
    from difflib import get_close_matches

    from megaconv.commands.cli import COMMANDS
    from megatron_lite.settings import other_trainers

    if command in COMMANDS:
        return f"`megaconv {command}` is a command of the converter"
    if command in other_trainers.COMMANDS:
        return f"`megatron-lite {other_trainers.COMMANDS[command]}` does that"
    known = (*DESCRIPTIONS, *OTHERS)
    near = get_close_matches(command, known, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _run_other(command: str, words: list[str]) -> int | None:
    """Run a command that doesn't train, and return its exit status."""
    try:
        with _written_output():
            status: int | None = import_module(OTHERS[command]).main(words)
    except UsageError as error:
        return refuse(str(error), error.exit_status)
    return status


@contextmanager
def _written_output() -> Iterator[None]:
    """End the process with status 1 if its output can't be written. A closed pipe needs no message."""
    try:
        try:
            yield
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except OSError as error:
        if not is_of_stream(error):
            raise
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_unread = isinstance(error, BrokenPipeError)
        sys.exit(1 if is_unread else refuse(in_words(error), 1))


def _train(command: str, words: list[str]) -> None:
    try:
        adopt()
        _help_if_asked(command, words)
        settings, ignored = _settings(command, words)
        require_torch(f"megatron-lite {command}", extras="train,data")
    except CheckpointError as error:
        _refuse(str(error), error.exit_status)
    if ignored and _is_first():
        flags = ", ".join(ignored)
        print(f"without effect here: {flags}", file=sys.stderr)
    from megatron_lite.loop.session import run

    run(settings, finetune=command == "finetune")


def _settings(command: str, words: list[str]) -> "tuple[Settings, list[str]]":
    """Return the settings, and the accepted flags that have no effect here. Raises CheckpointError."""
    from megatron_lite.settings.arguments import parse
    from megatron_lite.settings.early_checks import check_load, with_best_iterations

    short = _short_form(words) if command == "finetune" else None
    settings, ignored = parse(command, words if short is None else words[2:], short)
    settings = with_best_iterations(settings)
    check_load(settings)
    return settings, ignored


def _help_if_asked(command: str, words: Sequence[str]) -> None:
    """Print the help and end the process, if the words ask for it."""
    if not _asks_for_help(words):
        return
    if _is_first():
        from megatron_lite.settings.arguments import make_parser
        from megatron_lite.settings.help_text import short_help

        text = make_parser(command).format_help() if "--help-all" in words else short_help(command)
        with _written_output():
            print(text, end="")
    sys.exit(0)


def _asks_for_help(words: Sequence[str]) -> bool:
    return not {"-h", "--help", "--help-all"}.isdisjoint(words)


def _short_form(words: Sequence[str]) -> "ShortForm | None":
    """Return MODEL and DATA, and what the processes and the device are. Raises UsageError."""
    from megatron_lite.settings.short_form import ShortForm, positionals

    found = positionals(words)
    if not found:
        return None
    model, data = found
    from megaconv.hub import require_input

    require_input(model)
    require_torch("megatron-lite finetune", extras="train,data")
    import torch

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return ShortForm(model, data, ranks, bf16=bf16)


def _is_first() -> bool:
    """Return whether this is rank 0. All ranks have the same output, so only rank 0 prints it."""
    return os.environ.get("RANK", "0") == "0"


def _refuse(message: str, status: int = 2) -> None:
    sys.exit(refuse(message, status))
