"""Flags that all inference commands share, and their start and end. It does not import torch, so that --help needs none."""

import argparse
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

from megaconv.best_iteration import with_best
from megaconv.errors import CheckpointError, UsageError
from megaconv.extras import require_torch
from megaconv.hub import require_input
from megaconv.local_paths import local_word
from megaconv.terminal import show
from megatron_lite.data.tokenizer import TYPES
from megatron_lite.processes.failure import refuse
from megatron_lite.processes.slurm import adopt
from megatron_lite.settings.earlier_flags import with_todays_flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.sizes import LONGEST_UNASKED

DTYPES = ("bf16", "fp16", "fp32")
QUANTIZED = ("q8_0",)
TIMEOUT_MINUTES = 10.0
ONE_PROCESS: Mapping[str, Any] = {
    "tp": 1, "pp": 1, "ep": 1, "distributed_backend": None, "distributed_timeout_minutes": TIMEOUT_MINUTES,
}  # fmt: skip
"""Values of the flags of the layout for a command without them."""


class Parser(FlagParser):
    """The parser of a command that loads a model."""

    def error(self, message: str) -> NoReturn:
        if message == "the following arguments are required: --load":
            raise UsageError(f"MODEL is missing; write: {self.prog} MODEL; --help lists all flags")
        super().error(message)


def make_parser(
    command: str,
    description: str,
    examples: str,
    *,
    needs_model: bool = True,
    quantizes: bool = True,
    adapts: bool = True,
    has_rows: bool = True,
    has_length: bool = True,
    has_layout: bool = True,
) -> Parser:
    """Return a parser with the flags for the model and its layout.

    quantizes: whether it has --quantize. adapts: whether it has --adapter. has_rows: whether it has --slots.
    has_length: whether it has --max-length. has_layout: False for a command that computes in one process.
    """
    parser = Parser(
        prog=f"megatron-lite {command}", description=description, epilog=f"examples:\n{examples}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(
        training=None,
        stream_weights=False,
        quantize=None,
        draft_tokens=0,
        adapter=[],
        slots=None,
        max_length=None,
    )
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--load",
        required=needs_model,
        metavar="PATH",
        help="any checkpoint that megaconv reads, or a Hub id; as the first word it needs no --load",
    )
    if adapts:
        add(
            "--adapter",
            action="append",
            default=[],
            metavar="[NAME=]DIR",
            help="LoRA adapter as peft saves it, computed without merging; may be repeated, and the first one is the default",
        )
    add("--dtype", choices=DTYPES, help="to compute in (the checkpoint's)")
    if quantizes:
        add(
            "--quantize",
            choices=QUANTIZED,
            help="round the matrices to int8 while they are loaded, and multiply in int8, on a CPU (off)",
        )
    if has_rows:
        add(
            "--slots",
            type=int,
            default=8,
            metavar="N",
            help="rows that each data-parallel rank computes at the same time (8)",
        )
    if has_length:
        add(
            "--max-length",
            type=int,
            metavar="N",
            help=f"tokens of a row, prompt and answer (the model's positions, at most {LONGEST_UNASKED})",
        )
    _add_tokenizer(group)
    if has_layout:
        _add_layout(parser)
    else:
        parser.set_defaults(**ONE_PROCESS)
    return parser


def _add_tokenizer(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the tokenizer."""
    add = group.add_argument
    add(
        "--tokenizer-type",
        choices=TYPES,
        metavar="TYPE",
        help="kind of tokenizer: " + ", ".join(TYPES),
    )
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="the tokenizer's file or directory (the checkpoint's)",
    )
    add(
        "--vocab-file",
        type=local_word,
        metavar="PATH",
        help="vocabulary of a GPT-2 or BERT tokenizer",
    )
    add("--merge-file", type=local_word, metavar="PATH", help="merges of a GPT-2 tokenizer")


def _add_layout(parser: Parser) -> None:
    """Add the flags of the ranks."""
    add = parser.add_argument_group(
        "parallelism (torchrun or srun starts tp x pp processes)"
    ).add_argument
    add(
        "--tensor-model-parallel-size",
        "--tp",
        dest="tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share matrices",
    )
    add(
        "--pipeline-model-parallel-size",
        "--pp",
        dest="pp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the layers",
    )
    add(
        "--expert-model-parallel-size",
        "--ep",
        dest="ep",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share experts",
    )
    add(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        help="nccl with a GPU for every process, else gloo",
    )
    add(
        "--distributed-timeout-minutes",
        type=float,
        default=TIMEOUT_MINUTES,
        metavar="X",
        help=f"give up on a silent rank after ({TIMEOUT_MINUTES:g})",
    )


def add_sampling(parser: Parser, *, max_new_tokens: int) -> None:
    """Add the flags of generation."""
    add = parser.add_argument_group("generation").add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"the most tokens of an answer ({max_new_tokens})",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0: always the likeliest token (0)",
    )
    add("--top-k", type=int, default=0, metavar="N", help="choose among so many likeliest (all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="choose among the likeliest that make up this probability (1)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="choose among tokens with this share of the likeliest one's probability (0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens that came already become less likely (1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of samples (0)")
    add("--stop", nargs="+", default=[], metavar="WORD", help="end before one of these")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")


_USUAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Flags that choose among tokens for a sample, with their defaults."""


def show_without_effect(given: argparse.Namespace) -> None:
    """Print the flags of sampling that have no effect, because always the likeliest token is chosen."""
    if given.temperature > 0 or os.environ.get("RANK", "0") != "0":
        return
    names = [name for name, usual in _USUAL.items() if getattr(given, name) != usual]
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        show(
            f"without effect here: {flags}; samples need a --temperature above 0",
            sys.stderr,
        )


def add_drafting(parser: Parser) -> None:
    """Add the flag of drafts."""
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="let the model's MTP layer draft N tokens for each step, which the model checks at once (0: no drafts)",
    )


def add_images(parser: Parser) -> None:
    """Add the flag of images."""
    parser.add_argument(
        "--image-encoder",
        metavar="DIR",
        help="the multimodal model that reads images, if the model is a checkpoint of its language model",
    )


def add_samples(group: argparse._ArgumentGroup, *, samples: int, seq_length: int = 512) -> None:
    """Add the flags of data that a model only reads. samples, seq_length: the defaults."""
    group.add_argument(
        "--data",
        required=True,
        nargs="+",
        type=local_word,
        metavar="PATH",
        help="chats or texts as `finetune` reads them, or the prefix of an indexed dataset",
    )
    group.add_argument(
        "--chat-template",
        type=local_word,
        metavar="FILE",
        help="chat template for chats (the tokenizer's own)",
    )
    group.add_argument(
        "--samples",
        type=int,
        default=samples,
        metavar="N",
        help=f"the most samples ({samples})",
    )
    group.add_argument(
        "--seq-length",
        type=int,
        default=seq_length,
        metavar="N",
        help=f"the most tokens of a sample ({seq_length})",
    )


def make_ranker(
    command: str,
    description: str,
    examples: str,
    *,
    parts: str | None,
    samples: int,
    output: str | None = None,
) -> tuple[Parser, argparse._ArgumentGroup]:
    """Return the parser of a command that ranks parts of a model, and its group of flags. No weight stays in memory.

    parts: the parts of which the user gives a number to leave out; None: there is no such flag. samples: the default.
    output: the content of the file that the user names; None: there is no file.
    """
    made = make_parser(
        command,
        f"{description} No weight stays in memory.",
        examples,
        quantizes=False,
        adapts=False,
        has_rows=False,
        has_length=False,
        has_layout=False,
    )
    made.set_defaults(stream_weights=True)
    group = made.add_argument_group("measurement")
    add_samples(group, samples=samples)
    if parts is not None:
        group.add_argument(
            "--leave-out",
            type=int,
            metavar="N",
            help=f"{parts} to leave out (a quarter of all)",
        )
    group.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="memory for activations and the block of weights that is being read (4GiB)",
    )
    if output is not None:
        group.add_argument(
            "--output", required=True, type=local_word, metavar="FILE", help=f"{output}, as JSON"
        )
    return made, group


def add_streaming(parser: Parser) -> None:
    """Add the flags of a model that is not held in memory."""
    parser.add_argument(
        "--stream-weights",
        action="store_true",
        help="read each matrix from the checkpoint whenever it is used, for a model that is larger than the memory",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="with --stream-weights: memory, of which an eighth holds weights, at most 64 MiB (4GiB)",
    )


def command(
    parser: Parser,
    words: list[str],
    module: str,
    extras: str = "train,data",
    *,
    of_training: bool = False,
) -> int:
    """Run a command and return the exit status.

    module: its main(given) runs the command on every rank and needs torch. extras: the extras to install for it.
    of_training: True if the command also takes the flags of a training script (training_flags.py).
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        adopt()
        if {"-h", "--help"} & set(words) and not first:
            return 0
        words = _with_load(words)
        given = (
            parse_with_training_flags(parser, words) if of_training else parser.parse_args(words)
        )
        if given.load is not None:
            given.load = with_best(given.load)
            require_input(given.load)
        require_torch(parser.prog, extras)
        import_module(module).main(given)
    except CheckpointError as error:
        return refuse(str(error), error.exit_status)
    return 0


def _with_load(words: list[str]) -> list[str]:
    """Return a command line that names the model by --load, where its first word may name it."""
    has_load = any(word.partition("=")[0] == "--load" for word in words)
    if has_load or not words or words[0].startswith("-"):
        return words
    return ["--load", *words]


def parse_with_training_flags(parser: Parser, words: list[str]) -> argparse.Namespace:
    """Return the values of a command that also takes flags of a training script. Raises UsageError."""
    from megatron_lite.inference.training_flags import take_training_flags

    command = parser.prog.rpartition(" ")[2]
    given, rest = parser.parse_known_args(with_todays_flags(words, command))
    own_slots = any(word.partition("=")[0] == "--slots" for word in words)
    of_training = take_training_flags(given, rest, parser)
    if own_slots and "micro_batch_size" in of_training.settings.given:
        raise UsageError("--slots and --micro-batch-size are the same number here; give one")
    given.training = of_training.settings
    if of_training.without_effect and os.environ.get("RANK", "0") == "0":
        show(f"without effect here: {', '.join(of_training.without_effect)}", sys.stderr)
    return given
