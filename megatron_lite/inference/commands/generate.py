"""Flags of `megatron-lite generate`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, add_sampling, command, make_parser

EXAMPLES = """  megatron-lite generate --load Llama-2-7b "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95
  torchrun --nproc-per-node 4 -m megatron_lite generate --load ckpt --tp 2 --pp 2 --prompts-file prompts.jsonl --output answers.jsonl"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser("generate", "Let a model continue texts.", EXAMPLES)
    made.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    made.add_argument(
        "--prompts-file",
        type=local_word,
        metavar="FILE",
        help='JSON lines of {"prompt": ...} (.jsonl), or one prompt a line; - for standard input',
    )
    made.add_argument(
        "--output",
        type=local_word,
        metavar="FILE",
        help="JSON lines, in the order of the prompts; - for standard output",
    )
    add_sampling(made, max_new_tokens=64)
    made.add_argument(
        "--log-probs",
        type=int,
        metavar="N",
        help="also log-probabilities, and the N likeliest tokens (in --output)",
    )
    made.add_argument("--beams", type=int, metavar="N", help="beam search, as transformers has it")
    made.add_argument(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="of beams: above 0 favours long ones (1)",
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.generating")
