"""Flags of `megatron-lite generate`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import (
    Parser,
    add_drafting,
    add_images,
    add_sampling,
    add_streaming,
    command,
    make_parser,
)

EXAMPLES = """  megatron-lite generate Llama-2-7b "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95
  torchrun --nproc-per-node 4 -m megatron_lite generate ckpt --tp 2 --pp 2 --prompts-file prompts.jsonl --output answers.jsonl
  megatron-lite generate ckpt --unconditional --num-samples 100000 --temperature 1 --top-p 0.9 --output self.jsonl --resume"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser("generate", "Let a model continue texts.", EXAMPLES)
    made.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    made.add_argument(
        "--prompts-file",
        type=local_word,
        metavar="FILE",
        help='JSON lines of {"prompt": ...} or of chats (.jsonl), or one prompt a line; - for standard input of either kind',
    )
    made.add_argument(
        "--retro-neighbors",
        type=local_word,
        metavar="FILE",
        help='Retro: JSON lines of {"prompt": ..., "neighbors": [text, ...]}, the passages for each prompt',
    )
    made.add_argument(
        "--retro-project-dir",
        type=local_word,
        metavar="DIRECTORY",
        help="Retro: search the neighbors of each chunk in this project of `megatron-lite retro build`",
    )
    made.add_argument(
        "--retro-megatron-neighbors",
        action="store_true",
        help="neighbors as Megatron: a continuation goes on in the next document",
    )
    made.add_argument(
        "--output",
        type=local_word,
        metavar="FILE",
        help="JSON lines, in the order of the prompts; - for standard output",
    )
    made.add_argument(
        "--unconditional", action="store_true", help="samples of whole texts, without a prompt"
    )
    made.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="with --unconditional (1)"
    )
    made.add_argument(
        "--samples-per-prompt",
        type=int,
        metavar="N",
        help="samples of each prompt, each with a seed of its own; lines get the prompt's number as `id`",
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="continue --output, which an interrupted run with the same flags has left",
    )
    add_streaming(made)
    add_images(made)
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
    add_drafting(made)
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.generating")
