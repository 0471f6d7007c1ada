"""Flags of `megatron-lite rank-experts`."""

from megatron_lite.inference.flags import Parser, command, make_ranker

EXAMPLES = """  megatron-lite rank-experts Qwen3-30B-A3B --data chats.jsonl --leave-out 32 --output kept.json
  megatron-lite rank-experts ckpt --data corpus_text_document --samples 256 --seq-length 2048 --output kept.json
  megaconv convert Qwen3-30B-A3B pruned --saver hf --keep-experts kept.json"""


def parser() -> Parser:
    """Return the parser of the command."""
    made, _ = make_ranker(
        "rank-experts",
        "Measure how much each expert adds to the output of its layer, to leave experts out with `megaconv convert --keep-experts`.",
        EXAMPLES,
        parts="experts of each layer",
        samples=64,
        output="the experts that stay, and the scores of all",
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.expert_ranking")
