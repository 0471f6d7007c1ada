"""Flags of `megatron-lite rank-layers`."""

from megatron_lite.inference.flags import Parser, command, make_ranker

EXAMPLES = """  megatron-lite rank-layers Mistral-7B --data chats.jsonl --leave-out 8
  megatron-lite rank-layers ckpt --data corpus_text_document --samples 32 --dtype bf16 --json
  megaconv convert Mistral-7B pruned --saver hf --layers 0-20,29-31"""


def parser() -> Parser:
    """Return the parser of the command."""
    made, group = make_ranker(
        "rank-layers",
        "Measure how much each layer changes its input, to leave layers out with `megaconv convert --layers`.",
        EXAMPLES,
        parts="layers",
        samples=16,
    )
    group.add_argument("--json", action="store_true", help="print one JSON document")
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.ranking")
