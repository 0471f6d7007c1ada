"""Flags of `megatron-lite rank-channels`."""

from megatron_lite.inference.flags import Parser, command, make_ranker

EXAMPLES = """  megatron-lite rank-channels Llama-3.1-8B --data chats.jsonl --ffn-hidden-size 9216 --hidden-size 3072 --output kept.json
  megatron-lite rank-channels Qwen3-30B-A3B --data chats.jsonl --moe-ffn-hidden-size 512 --output kept.json
  megaconv convert Llama-3.1-8B pruned --saver hf --keep-channels kept.json"""


def parser() -> Parser:
    """Return the parser of the command."""
    made, _ = make_ranker(
        "rank-channels",
        "Measure how much each channel of hidden states and of MLPs adds, to make a model narrower with `megaconv convert "
        "--keep-channels`.",
        EXAMPLES,
        parts=None,
        samples=64,
        output="the channels that stay",
    )
    sizes = made.add_argument_group("sizes that the model gets; give one or more")
    for flag, channels in (
        ("--hidden-size", "hidden states"),
        ("--ffn-hidden-size", "each dense MLP"),
        ("--moe-ffn-hidden-size", "each routed expert"),
        ("--moe-shared-expert-intermediate-size", "each shared expert"),
    ):
        sizes.add_argument(flag, type=int, metavar="N", help=f"channels of {channels}")
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.channel_ranking")
