"""Flags of `megatron-lite rank-experts`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, add_samples, command, make_parser

EXAMPLES = """  megatron-lite rank-experts Qwen3-30B-A3B --data chats.jsonl --leave-out 32 --output kept.json
  megatron-lite rank-experts ckpt --data corpus_text_document --samples 256 --seq-length 2048 --output kept.json
  megaconv convert Qwen3-30B-A3B pruned --saver hf --keep-experts kept.json"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "rank-experts",
        "Measure how much each expert adds to the output of its layer, to leave experts out with `megaconv convert --keep-experts`. "
        "No weight stays in memory.",
        EXAMPLES,
        quantizes=False,
        adapts=False,
        has_rows=False,
        has_length=False,
        has_layout=False,
    )
    made.set_defaults(stream_weights=True)
    group = made.add_argument_group("measurement")
    add_samples(group, samples=64)
    add = group.add_argument
    add(
        "--leave-out",
        type=int,
        metavar="N",
        help="experts of each layer to leave out (a quarter of all)",
    )
    add(
        "--output",
        required=True,
        type=local_word,
        metavar="FILE",
        help="the experts that stay, and the scores of all, as JSON",
    )
    add(
        "--max-memory",
        metavar="SIZE",
        help="memory for activations and the block of weights that is being read (4GiB)",
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.expert_ranking")
