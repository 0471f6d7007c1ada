"""Flags of `megatron-lite rank-layers`."""

from megatron_lite.inference.flags import Parser, add_samples, command, make_parser

EXAMPLES = """  megatron-lite rank-layers Mistral-7B --data chats.jsonl --leave-out 8
  megatron-lite rank-layers ckpt --data corpus_text_document --samples 32 --dtype bf16 --json
  megaconv convert Mistral-7B pruned --saver hf --layers 0-20,29-31"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "rank-layers",
        "Measure how much each layer changes its input, to leave layers out with `megaconv convert --layers`. "
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
    add_samples(group, samples=16)
    add = group.add_argument
    add(
        "--leave-out",
        type=int,
        metavar="N",
        help="layers to leave out (a quarter of all)",
    )
    add(
        "--max-memory",
        metavar="SIZE",
        help="memory for activations and the block of weights that is being read (4GiB)",
    )
    add("--json", action="store_true", help="print one JSON document")
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.ranking")
