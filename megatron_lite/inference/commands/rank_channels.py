"""Flags of `megatron-lite rank-channels`."""

from megatron_lite.inference.flags import Parser, command, make_ranker

EXAMPLES = """  megatron-lite rank-channels Llama-3.1-8B --data chats.jsonl --ffn-hidden-size 9216 --hidden-size 3072 --output kept.json
  megatron-lite rank-channels Qwen3-30B-A3B --data chats.jsonl --moe-ffn-hidden-size 512 --output kept.json
  megatron-lite rank-channels Llama-3.1-8B --data chats.jsonl --num-query-groups 4 --output kept.json
  megaconv convert Llama-3.1-8B pruned --saver hf --keep-channels kept.json"""


def parser() -> Parser:
    """Return the parser of the command."""
    made, _ = make_ranker(
        "rank-channels",
        "Measure how much each channel of hidden states and of MLPs and each head adds, to make a model narrower with `megaconv convert "
        "--keep-channels`.",
        EXAMPLES,
        parts=None,
        samples=64,
        output="the channels and heads that stay",
    )
    sizes = made.add_argument_group("sizes that the model gets; give one or more")
    for flag, parts in (
        ("--hidden-size", "channels of hidden states"),
        ("--ffn-hidden-size", "channels of each dense MLP"),
        ("--moe-ffn-hidden-size", "channels of each routed expert"),
        ("--moe-shared-expert-intermediate-size", "channels of each shared expert"),
        ("--num-attention-heads", "heads of each attention"),
        ("--num-query-groups", "groups of these heads, which share keys and values"),
        ("--mamba-num-heads", "heads of each Mamba"),
        ("--mamba-num-groups", "groups of these heads, which share B and C"),
        ("--linear-num-value-heads", "value heads of each linear attention"),
        ("--linear-num-key-heads", "key heads of each linear attention, each with its value heads"),
    ):
        sizes.add_argument(flag, type=int, metavar="N", help=parts)
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.channel_ranking")
