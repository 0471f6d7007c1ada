"""The parser, the start and the end of the commands of retrieval. Nothing here imports torch."""

import argparse
import sys
from collections.abc import Callable

from megaconv.errors import CheckpointError, Interrupted
from megaconv.local_paths import local_path
from megaconv.terminal import in_words
from megatron_lite.data.tokenizer import TYPES
from megatron_lite.processes.failure import refuse
from megatron_lite.settings.flag_parser import FlagParser

Add = Callable[..., object]


def parser_of(command: str, description: str, examples: str) -> FlagParser:
    """Return a parser without flags."""
    return FlagParser(
        prog=f"megatron-lite {command}", description=description, epilog=f"examples:\n{examples}",
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def add_count(add: Add, flag: str, default: int | None, text: str, **more: object) -> None:
    """Add a flag for a number of at least 1."""
    shown = "" if default is None else f" ({default:,})"
    add(flag, type=_count, default=default, metavar="N", help=f"{text}{shown}", **more)


def add_tokenizer(add: Add, prefix: str = "") -> None:
    """Add the flags of a tokenizer. prefix: of further names, such as `retro-gpt-`."""

    def names(flag: str) -> tuple[str, ...]:
        return (f"--{flag}", f"--{prefix}{flag}") if prefix else (f"--{flag}",)

    add(*names("tokenizer-type"), choices=TYPES, metavar="TYPE", help="; ".join(TYPES))
    add(*names("tokenizer-model"), metavar="PATH", help="the tokenizer's file or directory")
    add(
        *names("vocab-file"),
        type=local_path,
        metavar="FILE",
        help="vocabulary of a GPT-2 or BERT tokenizer",
    )
    add(*names("merge-file"), type=local_path, metavar="FILE", help="merges of a GPT-2 tokenizer")
    add("--vocab-size", type=_count, metavar="N", help="tokens of a NullTokenizer")


def _count(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of at least 1")
    return number


def run_command(run: Callable[[], None]) -> int:
    """Call run() and return the exit status. Errors of the user become one line."""
    try:
        run()
    except CheckpointError as error:
        return refuse(str(error), error.exit_status)
    except OSError as error:
        return refuse(in_words(error), 1)
    except (KeyboardInterrupt, Interrupted):
        print("megatron-lite: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0
