"""Flags of `megatron-lite score`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, command, make_parser

EXAMPLES = """  megatron-lite score Llama-2-7b --input rows.jsonl --output scores.jsonl
  torchrun --nproc-per-node 2 -m megatron_lite score ckpt --tp 2 --input rows.jsonl --top 5"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "score",
        "Log-probabilities of given tokens, each given those before it in its row.",
        EXAMPLES,
        has_rows=False,
        has_length=False,
    )
    made.add_argument(
        "--input", required=True, type=local_word, metavar="FILE",
        help='JSON lines of {"tokens": [...]}, {"text": ...} or {"prompt": ..., "completion": ...}: of these the completion counts',
    )  # fmt: skip
    made.add_argument(
        "--output",
        default="-",
        type=local_word,
        metavar="FILE",
        help="JSON lines, in the same order (standard output)",
    )
    made.add_argument(
        "--top", type=int, default=0, metavar="N", help="also the N likeliest tokens at each place"
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.scoring")
